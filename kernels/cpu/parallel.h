// Shares items among the threads of the caller's OpenMP pool: each takes the next one that nobody has.
//
// `in_one_region` opens a region for many shared loops: its threads all run the same code and meet at the end of each
// loop. Opening a region for each loop would cost more than the smaller ones take.
#pragma once

#include <sched.h>

#include "ops.h"
#include "vec.h"

namespace {

constexpr int MAX_MEMBERS = 256;

struct Team {
  // The next item of a member's own share of the present loop: on a cache line of its own, as its owner mostly asks.
  struct alignas(64) Share {
    int64_t next = 0;
  };
  Share shares[MAX_MEMBERS];
  int64_t arrived = 0;  // members that found no item any more
  int64_t loop = 0;
  int64_t members = 1;
  int64_t numbered = 0;  // members that have their number

  // Computes items of the present loop as long as there are any: a member's own share, which is a run of items, since
  // neighbours often share what they read; then what others have not come to.
  template <class Body>
  void take(int64_t items, int64_t member, const Body& body) {
    for (int64_t i = 0; i < members; i++) {
      const int64_t owner = (member + i) % members, begin = items * owner / members;
      const int64_t end = items * (owner + 1) / members;
      for (;;) {
        const int64_t item = begin + __atomic_fetch_add(&shares[owner].next, 1, __ATOMIC_RELAXED);
        if (item >= end) break;
        body(item);
      }
    }
  }

  // Waits until all members have come. The last one prepares the next loop.
  void meet() {
    constexpr int PATIENCE = 4096;  // looks (some 50 us) before a waiting thread offers its core to others
    const int64_t present = __atomic_load_n(&loop, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == members) {
      for (int64_t i = 0; i < members; i++) shares[i].next = 0;
      arrived = 0;
      __atomic_store_n(&loop, present + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int looks = 0; __atomic_load_n(&loop, __ATOMIC_ACQUIRE) == present; looks++)
      looks < PATIENCE ? pause() : static_cast<void>(sched_yield());
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
};

// Of the region that this thread runs in, or null.
inline Team* current_team() { return static_cast<Team*>(membership.team); }

// Calls body() on at most `threads` threads at once. Loops in it are shared; whatever else it does, each thread does.
template <class Body>
inline void in_one_region(int threads, const Body& body) {
  struct Region {
    const Body& body;
    Team team;
  } region{body, {}};
  const auto enter = [](void* shared) {
    Region& entered = *static_cast<Region*>(shared);
    __atomic_store_n(&entered.team.members, openmp.num_threads(), __ATOMIC_RELAXED);  // may be fewer than asked for
    membership = {&entered.team, __atomic_fetch_add(&entered.team.numbered, 1, __ATOMIC_RELAXED)};
    entered.body();
    membership.team = nullptr;
  };
  if (threads <= 1 || openmp.parallel == nullptr) return body();
  openmp.parallel(enter, &region, static_cast<unsigned>(min(threads, MAX_MEMBERS)), 0);
}

// Calls body(state, i) for i in 0 .. items - 1, on at most `threads` threads, in any order, and returns when all are
// done. Each thread has a State of its own for the whole loop.
template <class State, class Body>
inline void parallel_for_with(int64_t items, int threads, const Body& body) {
  const auto take_part = [&] {
    State state;
    current_team()->take(items, membership.number, [&](int64_t i) { body(state, i); });
  };
  if (current_team() != nullptr) {
    take_part();
    return current_team()->meet();
  }
  const int64_t members = min(threads, items);
  if (members > 1 && openmp.parallel != nullptr)  // whose end they wait for anyway
    return in_one_region(static_cast<int>(members), take_part);
  State state;
  for (int64_t i = 0; i < items; i++) body(state, i);
}

// The same for a body(i) that keeps nothing from one item to the next.
template <class Body>
inline void parallel_for(int64_t items, int threads, const Body& body) {
  struct Nothing {};
  parallel_for_with<Nothing>(items, threads, [&](Nothing&, int64_t i) { body(i); });
}

// Calls body(begin, end) over ranges of rows that are worth a thread's while.
template <class Body>
inline void parallel_rows(int64_t rows, int64_t elements_per_row, int threads, const Body& body) {
  constexpr int64_t ELEMENTS_PER_ITEM = 1 << 11;
  const int64_t grain = max(1, ELEMENTS_PER_ITEM / max(1, elements_per_row));
  parallel_for(ceil_div(rows, grain), threads,
               [&](int64_t item) { body(item * grain, min(rows, (item + 1) * grain)); });
}

}  // namespace

// Shares items among the threads of the caller's OpenMP pool: each takes the next one that nobody has.
#pragma once

#include "ops.h"
#include "vec.h"
namespace {

struct Team {
  void (*run)(const void* body, int64_t item);
  const void* body;
  int64_t items;
  int64_t next;
};

inline void work(void* shared) {
  Team* team = static_cast<Team*>(shared);
  for (;;) {
    const int64_t item = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
    if (item >= team->items) return;
    team->run(team->body, item);
  }
}

// Calls body(i) for i in 0 .. items - 1, on at most `threads` threads, in any order.
template <class Body>
inline void parallel_for(int64_t items, int threads, const Body& body) {
  const auto run = [](const void* shared, int64_t item) { (*static_cast<const Body*>(shared))(item); };
  Team team{run, &body, items, 0};
  const int64_t members = min(threads, items);
  if (members <= 1 || gomp_parallel == nullptr) {
    work(&team);
  } else {
    gomp_parallel(work, &team, static_cast<unsigned>(members), 0);
  }
}

// Calls body(begin, end) over ranges of rows that are worth a thread's while.
template <class Body>
inline void parallel_rows(int64_t rows, int64_t elements_per_row, int threads, const Body& body) {
  constexpr int64_t ELEMENTS_PER_ITEM = 1 << 14;
  const int64_t grain = max(1, ELEMENTS_PER_ITEM / max(1, elements_per_row));
  parallel_for(ceil_div(rows, grain), threads,
               [&](int64_t item) { body(item * grain, min(rows, (item + 1) * grain)); });
}

}  // namespace

// What driver.cpp needs of a machine without an operating system: memory, numbers, a report by the serial port.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/cpu/ops.h"

OpenMp openmp = {};
__thread Membership membership = {};

extern "C" void* memcpy(void* to, const void* from, unsigned long bytes) {
  void* const start = to;
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
  return start;
}

extern "C" void* memset(void* to, int value, unsigned long bytes) {
  void* const start = to;
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
  return start;
}

extern "C" int memcmp(const void* a, const void* b, unsigned long bytes) {
  const auto *left = static_cast<const uint8_t*>(a), *right = static_cast<const uint8_t*>(b);
  for (; bytes > 0; bytes--, left++, right++)
    if (*left != *right) return *left - *right;
  return 0;
}

extern "C" int sched_yield() { return 0; }

namespace {

struct bf16 {
  uint16_t bits;
};

template <class T>
DType type_of() {
  return sizeof(T) == sizeof(bf16) ? BFLOAT16 : FLOAT32;
}

template <class T>
const char* type_name() {
  return sizeof(T) == 1 ? "bytes" : sizeof(T) == 2 ? "bfloat16" : sizeof(T) == 4 ? "float32" : "int64";
}

constexpr uint16_t SERIAL = 0x3f8;

void put_byte(uint16_t port, uint8_t value) { asm volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }

uint8_t get_byte(uint16_t port) {
  uint8_t value;
  asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

void print(const char* text) {
  for (; *text != 0; text++) {
    while ((get_byte(SERIAL + 5) & 0x20) == 0) continue;  // until the one before is sent
    put_byte(SERIAL, static_cast<uint8_t>(*text));
  }
}

void print(int64_t number) {
  char digits[24];
  int i = 23;
  digits[i] = 0;
  do digits[--i] = static_cast<char>('0' + number % 10);
  while ((number /= 10) > 0);
  print(digits + i);
}

alignas(64) char memory[64 << 20];
int64_t used = 0;

// Memory that is free again at the end of a scope.
class Reserve {
 public:
  Reserve() = default;
  ~Reserve() { used = before; }
  Reserve(const Reserve&) = delete;

  template <class T>
  T* get(int64_t count) {
    T* const start = reinterpret_cast<T*>(memory + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 127) / 64 * 64;
    return start;
  }

 private:
  int64_t before = used;
};

uint64_t state = 1;

uint32_t draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

void set(float& to, float value) { to = value; }
void set(bf16& to, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  to.bits = static_cast<uint16_t>(bits >> 16);
}

// Numbers in [-1, 1).
template <class T>
T* random(Reserve& reserve, int64_t count) {
  T* const numbers = reserve.get<T>(count);
  for (int64_t i = 0; i < count; i++) set(numbers[i], static_cast<float>(draw() % 65536) / 32768.f - 1.f);
  return numbers;
}

float value_of(float x) { return x; }
float value_of(char x) { return x; }
float value_of(int64_t x) { return static_cast<float>(x); }
float value_of(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Of a result's size, or of the mean size where that is larger: sums cancel. NaN in one alone is infinite.
template <class T>
float worst_error(const T* expected, const T* actual, int64_t count) {
  float mean = 0, worst = 0;
  for (int64_t i = 0; i < count; i++) mean += __builtin_fabsf(value_of(expected[i])) / static_cast<float>(count);
  for (int64_t i = 0; i < count; i++) {
    const float a = value_of(expected[i]), b = value_of(actual[i]), size = __builtin_fabsf(a);
    const float error = a == b ? 0 : __builtin_fabsf(a - b) / (size > mean ? size : mean);
    if (!(error <= worst)) worst = error == error ? error : __builtin_inff();
  }
  return worst;
}

struct Tally {
  const char *isa, *what, *type;
  float worst, tolerance;
  int64_t runs, failures;
};

Tally tallies[256];
int64_t num_tallies = 0;

// Adds a run to the line of the report that it belongs to.
void report(const char* isa, const char* what, const char* type, float error, float tolerance) {
  int64_t i = 0;
  while (i < num_tallies && (tallies[i].isa != isa || tallies[i].what != what || tallies[i].type != type)) i++;
  if (i == num_tallies) tallies[num_tallies++] = {isa, what, type, 0, tolerance, 0, 0};
  tallies[i].runs++;
  tallies[i].failures += !(error <= tolerance);
  if (error > tallies[i].worst) tallies[i].worst = error;
}

void start_report() {
  put_byte(SERIAL + 3, 3);  // bytes of eight bits
  print("kernels compared with the portable build\n");
}

void end_report() {
  int64_t failures = 0;
  for (int64_t i = 0; i < num_tallies; i++) {
    const Tally& tally = tallies[i];
    failures += tally.failures;
    print(tally.failures == 0 ? "ok    " : "WRONG ");
    for (const char* text : {tally.isa, " ", tally.what, " ", tally.type, ": "}) print(text);
    print(tally.failures), print(" of "), print(tally.runs), print(" wrong, worst error ");
    print(tally.worst < 1e3f ? static_cast<int64_t>(tally.worst * 1e9f) : INT64_MAX), print("e-9\n");
  }
  print(failures == 0 ? "all right\n" : "failed\n");
  print("the end\n");
}

}  // namespace

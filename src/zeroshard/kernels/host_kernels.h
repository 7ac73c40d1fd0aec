// What the host's kernels share: numbers of 16 bits, loads and stores of them, and threads.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <unistd.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace {

enum Kind : int32_t { NONE, FP32, BF16, FP16, SPLIT, SIGNED, UNSIGNED };

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Nearest even; every NaN becomes the one that torch's vectorised conversion makes.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0xFFFFu : rounded);
}

inline void widen_bf16(const uint16_t* from, float* into, int64_t n) {
  INDEPENDENT
  for (int64_t i = 0; i < n; i++) into[i] = from_bits(static_cast<uint32_t>(from[i]) << 16);
}

inline void narrow_bf16(const float* from, uint16_t* into, int64_t n) {
  INDEPENDENT
  for (int64_t i = 0; i < n; i++) into[i] = to_bf16(from[i]);
}

#if defined(__F16C__)
inline void widen_fp16(const uint16_t* from, float* into, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < n; i++) into[i] = _cvtsh_ss(from[i]);
}

inline void narrow_fp16(const float* from, uint16_t* into, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(into + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  for (; i < n; i++) into[i] = _cvtss_sh(from[i], 0);
}
#else
#if defined(__ARM_FP16_FORMAT_IEEE)
using Half = __fp16;
#else
using Half = _Float16;
#endif

inline void widen_fp16(const uint16_t* from, float* into, int64_t n) {
  const Half* halves = reinterpret_cast<const Half*>(from);
  for (int64_t i = 0; i < n; i++) into[i] = static_cast<float>(halves[i]);
}

inline void narrow_fp16(const float* from, uint16_t* into, int64_t n) {
  Half* halves = reinterpret_cast<Half*>(into);
  for (int64_t i = 0; i < n; i++) halves[i] = static_cast<Half>(from[i]);
}
#endif

template <typename T>
inline T* at(void* data, int64_t i) {
  return static_cast<T*>(data) + i;
}

// Past the caches where the alignment allows it: the new parameters are read next by a copy to the device.
inline void stream(const uint16_t* from, uint16_t* into, int64_t n) {
  int64_t i = 0;
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(into) % 16 == 0)
    for (; i + 8 <= n; i += 8) {
      const __m128i eight = _mm_load_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(into + i), eight);
    }
#endif
  std::memcpy(into + i, from + i, (n - i) * sizeof(uint16_t));
}

// How this thread rounds and whether it flushes denormals, which torch.set_flush_denormal sets for its caller alone.
#if defined(__SSE2__)
inline uint64_t float_mode() { return _mm_getcsr(); }
inline void set_float_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
inline uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
inline uint64_t float_mode() { return 0; }
inline void set_float_mode(uint64_t) {}
#endif

// A part of some work, by its number: the parts of one work may run in any order and at the same time.
using Part = void (*)(const void* work, int64_t number);

// Threads that sleep between works. They never spin: torch's own pool and the training thread need the cores. The
// caller works too, and parts are claimed, not dealt out, so a thread that wakes late delays nothing.
class Crew {
 public:
  void run(Part part, const void* work, int64_t parts, int threads) {
    std::lock_guard<std::mutex> one_at_a_time(turn_);
    const int helpers = static_cast<int>(parts < threads ? parts : threads) - 1;
    {
      std::lock_guard<std::mutex> lock(state_);
      part_ = part, work_ = work, parts_ = parts, mode_ = float_mode(), next_ = 0, wanted_ = helpers;
    }
    try {
      for (; size_ < helpers; size_++) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
    }
    for (int i = 0; i < helpers; i++) wake_.notify_one();
    claim(part, work, parts);
    std::unique_lock<std::mutex> lock(state_);
    wanted_ = 0;  // nothing is left for who has not begun
    done_.wait(lock, [this] { return working_ == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      wanted_--, working_++;
      const Part part = part_;
      const void* const work = work_;
      const int64_t parts = parts_;
      set_float_mode(mode_);
      lock.unlock();
      claim(part, work, parts);
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  void claim(Part part, const void* work, int64_t parts) {
    for (int64_t number; (number = next_.fetch_add(1)) < parts;) part(work, number);
#if defined(__SSE2__)
    _mm_sfence();  // streamed stores are seen before the work counts as done
#endif
  }

  std::mutex turn_, state_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> next_{0};
  Part part_ = nullptr;
  const void* work_ = nullptr;
  int64_t parts_ = 0;
  uint64_t mode_ = 0;
  int size_ = 0, wanted_ = 0, working_ = 0;
};

// The crew of this process; a forked child has none of its parent's threads, so it gets a crew of its own. Crews are
// never destroyed: their threads sleep until the process ends.
Crew& crew() {
  static std::mutex mutex;
  static Crew* mine = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) mine = new Crew, owner = getpid();
  return *mine;
}

}  // namespace

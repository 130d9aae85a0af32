// What every translation unit shares: dtype codes, dispatch on them, and scratch memory that lives as long as a thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "simd.h"

#define PORTER_EXPORT extern "C" __attribute__((visibility("default")))

namespace porter {

// The codes that library.py passes.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kBool = 3 };

template <typename Body>
static inline void dispatch(int32_t dtype, Body body) {
  if (dtype == kBFloat16) body(bf16{});
  else body(float{});
}

// A buffer that grows and is then reused: kernels allocate nothing on the steady path.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <typename T>
  T* get(size_t count) {
    size_t bytes = (count * sizeof(T) + 255) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      if (data_ == nullptr) std::abort();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace porter

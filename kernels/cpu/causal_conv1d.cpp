// Causal depthwise convolution over time with a state, then silu. Channels are the vectors: a block of them keeps its
// weights, transposed, and its last inputs in the first-level cache while time runs.
#include "kernels.h"
#include "rows.h"

namespace porter {
namespace {

constexpr int64_t kBlock = 256;  // channels

struct Convolution {
  void *out, *next;
  const void *x, *weight, *bias, *state;  // bias, state: null or the dtype of x
  int64_t tokens, channels, kernel, batch_stride, token_stride, state_batch_stride, state_channel_stride;
};

// window [kernel][kBlock] is a ring of the last inputs; the input of token t is row (t + kernel) % kernel.
template <typename T>
void start_window(const Convolution& a, int64_t b, int64_t c0, int64_t count, float* window) {
  std::memset(window, 0, a.kernel * kBlock * sizeof(float));
  if (a.state == nullptr) return;
  const T* state = static_cast<const T*>(a.state) + b * a.state_batch_stride;
  for (int64_t c = 0; c < count; ++c)
    for (int64_t j = 0; j < a.kernel; ++j)
      window[j * kBlock + c] = to_float(state[(c0 + c) * a.state_channel_stride + j]);
}

template <typename T>
void block(const Convolution& a, int64_t b, int64_t c0, float* memory) {
  int64_t count = smaller(kBlock, a.channels - c0), kernel = a.kernel;
  float *weights = memory, *window = memory + kernel * kBlock;
  const T* weight = static_cast<const T*>(a.weight) + c0 * kernel;
  for (int64_t c = 0; c < count; ++c)
    for (int64_t j = 0; j < kernel; ++j) weights[j * kBlock + c] = to_float(weight[c * kernel + j]);
  start_window<T>(a, b, c0, count, window);
  const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + c0;
  for (int64_t t = 0; t < a.tokens; ++t) {
    const T* x = static_cast<const T*>(a.x) + b * a.batch_stride + t * a.token_stride + c0;
    T* out = static_cast<T*>(a.out) + (b * a.tokens + t) * a.channels + c0;
    int64_t newest = t % kernel;
    for_each_vector(count, [&](int64_t i, int n) {
      Vec value = load_count(x + i, n);
      store_count(window + newest * kBlock + i, value, n);
      Vec sum = fma(value, load_count(weights + (kernel - 1) * kBlock + i, n),
                    bias == nullptr ? zero() : load_count(bias + i, n));
      for (int64_t j = 0, row = newest; j < kernel - 1; ++j) {
        if (++row == kernel) row = 0;
        sum = fma(load_count(window + row * kBlock + i, n), load_count(weights + j * kBlock + i, n), sum);
      }
      store_count(out + i, silu(sum), n);
    });
  }
  T* next = static_cast<T*>(a.next) + (b * a.channels + c0) * kernel;
  for (int64_t j = 0; j < kernel; ++j) {
    const float* row = window + (a.tokens + j) % kernel * kBlock;
    for (int64_t c = 0; c < count; ++c) next[c * kernel + j] = from_float<T>(row[c]);
  }
}

}  // namespace
}  // namespace porter

// shape: batch, tokens, channels, kernel; strides in elements: x (batch, token), state (batch, channel), the last
// dimension of both contiguous. weight [channels, kernel], out [batch, tokens, channels] and next [batch, channels,
// kernel] are contiguous. state null: zeros; bias may be null.
PORTER_EXPORT void porter_causal_conv1d(void* out, void* next, const void* x, const void* weight, const void* bias,
                                        const void* state, const int64_t* shape, int32_t dtype, int32_t threads) {
  using namespace porter;
  Convolution a{out, next, x, weight, bias, state, shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7]};
  int64_t blocks = divide_up(a.channels, kBlock);
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t item = 0; item < shape[0] * blocks; ++item) {
      static thread_local Scratch memory;
      block<T>(a, item / blocks, item % blocks * kBlock, memory.get<float>(2 * a.kernel * kBlock));
    }
  });
}

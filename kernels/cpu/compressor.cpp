// Compression of keys: every window of m tokens becomes one entry [D], each channel weighted by a softmax over the window.
// Overlapped windows weigh the first D channels of the window before together with the last D of their own.
#include "kernels.h"

namespace porter {
namespace {

// m rows of keys and of gates, `bias` added to the gates where there is one.
template <typename T, typename G>
struct Slots {
  const T* kv;
  const G* gate;
  const float* bias;
  int64_t kv_stride, gate_stride, bias_stride, count;

  Vec score(int64_t j, int64_t i, int n) const {
    Vec gates = load_count(gate + j * gate_stride + i, n);
    return bias == nullptr ? gates : gates + load_count(bias + j * bias_stride + i, n);
  }
  Vec largest(Vec so_far, int64_t i, int n) const {
    for (int64_t j = 0; j < count; ++j) so_far = vmax(so_far, score(j, i, n));
    return so_far;
  }
  void add(Vec pivot, Vec& weighted, Vec& total, int64_t i, int n) const {
    for (int64_t j = 0; j < count; ++j) {
      Vec weight = exp(score(j, i, n) - pivot);
      total = total + weight;
      weighted = fma(weight, load_count(kv + j * kv_stride + i, n), weighted);
    }
  }
};

template <typename T, typename First, typename Second>
void compress(T* out, const First& before, const Second& own, int64_t size) {
  for_each_vector(size, [&](int64_t i, int n) {
    Vec lowest = set1(-std::numeric_limits<float>::infinity());
    Vec pivot = own.largest(before.largest(lowest, i, n), i, n), weighted = zero(), total = zero();
    before.add(pivot, weighted, total, i, n);
    own.add(pivot, weighted, total, i, n);
    store_count(out + i, weighted / total, n);
  });
}

}  // namespace
}  // namespace porter

// shape: B, W, m, D, overlapped. strides in elements: kv (b, w, j), gate (b, w, j), prior_kv (b, j), prior_gate (b, j).
// bias [m, D or 2D] contiguous; the priors, which have it already, may be null. out [B, W, D] contiguous.
PORTER_EXPORT void porter_compress(void* out, const void* kv, const void* gate, const float* bias, const void* prior_kv,
                                   const void* prior_gate, const int64_t* shape, const int64_t* strides, int32_t dtype,
                                   int32_t prior_gate_dtype, int32_t threads) {
  using namespace porter;
  int64_t windows = shape[1], rate = shape[2], size = shape[3], first = shape[4] ? size : 0, wide = first + size;
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T *states = static_cast<const T*>(kv), *gates = static_cast<const T*>(gate);
    auto slots = [&](int64_t b, int64_t w, int64_t channel) {
      return Slots<T, T>{states + b * strides[0] + w * strides[1] + channel,
                         gates + b * strides[3] + w * strides[4] + channel,
                         bias + channel,
                         strides[2],
                         strides[5],
                         wide,
                         w < 0 ? 0 : rate};
    };
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t item = 0; item < shape[0] * windows; ++item) {
      int64_t b = item / windows, w = item % windows;
      T* target = static_cast<T*>(out) + item * size;
      auto own = slots(b, w, first);
      if (w == 0 && first != 0 && prior_kv != nullptr) {
        dispatch(prior_gate_dtype, [&](auto gate_tag) {
          using G = decltype(gate_tag);
          Slots<T, G> before{static_cast<const T*>(prior_kv) + b * strides[6],
                             static_cast<const G*>(prior_gate) + b * strides[8],
                             nullptr,
                             strides[7],
                             strides[9],
                             0,
                             rate};
          compress(target, before, own, size);
        });
      } else {
        compress(target, slots(b, first == 0 ? -1 : w - 1, 0), own, size);
      }
    }
  });
}

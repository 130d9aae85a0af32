// What a query may see of the keys, key by key: shared by the indexer, which selects, and by attention over a selection.
#pragma once
#include "abi.h"

namespace porter {

// One row of a mask, from element `offset` on in steps of `stride`; without a mask the keys before `high` are seen.
struct MaskRow {
  const void* mask;
  int32_t dtype;
  int64_t offset, stride, keys, high;

  bool additive() const { return mask != nullptr && dtype != kBool; }

  template <typename M>
  M at(int64_t t) const {
    return static_cast<const M*>(mask)[offset + t * stride];
  }

  float bias(int64_t t) const {
    if (!additive()) return 0.0f;
    return dtype == kBFloat16 ? to_float(at<bf16>(t)) : at<float>(t);
  }

  // An additive mask hides a key by minus infinity or by the lowest value of its dtype.
  bool sees(int64_t t) const {
    if (mask == nullptr) return t < high;
    if (dtype == kBool) return at<uint8_t>(t) != 0;
    return bias(t) > (dtype == kBFloat16 ? to_float(bf16{0xff7f}) : std::numeric_limits<float>::lowest());
  }
};

}  // namespace porter

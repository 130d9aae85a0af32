// Which experts each token goes to: scores of every expert, then the best few by selection, one token a thread.
#include "kernels.h"
#include "rows.h"

namespace porter {
namespace {

// How scores are made of logits, and groups chosen: softmax without groups; sigmoid, groups by the sum of their two best;
// softmax, groups by their best; sqrt(softplus) without groups, choosing the best or, by_table, those already in `indices`.
enum Kind : int64_t { plain_softmax, grouped_sigmoid, grouped_softmax, sqrt_softplus, by_table };

// shape: T, H, E, k, groups, kept groups, stride of hidden, renormalize, kind.
struct Router {
  int64_t tokens, hidden, experts, top_k, groups, kept_groups, stride, renormalize, kind;
};

// Descending, and of equal values the first; a NaN counts as the largest, as in torch.topk.
void pick(const float* values, int64_t count, int64_t picks, int64_t* chosen, char* taken) {
  std::memset(taken, 0, count);
  for (int64_t p = 0; p < picks; ++p) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (taken[i]) continue;
      bool better = best < 0 || values[i] > values[best] || (values[i] != values[i] && values[best] == values[best]);
      if (better) best = i;
    }
    taken[best] = 1;
    chosen[p] = best;
  }
}

// Sigmoid: minus infinity outside the groups whose two best scores have the largest sums. Softmax: zero outside the
// groups with the largest scores.
void limit_groups(float* choice, const Router& a, float* sums, int64_t* kept, char* taken) {
  int64_t size = a.experts / a.groups, best = a.kind == grouped_sigmoid ? 2 : 1;
  float outside = a.kind == grouped_sigmoid ? -std::numeric_limits<float>::infinity() : 0.0f;
  for (int64_t g = 0; g < a.groups; ++g) {
    int64_t two[2];
    pick(choice + g * size, size, best, two, taken);
    sums[g] = choice[g * size + two[0]];
    if (best == 2) sums[g] += choice[g * size + two[1]];
  }
  pick(sums, a.groups, a.kept_groups, kept, taken);
  for (int64_t g = 0; g < a.groups; ++g)
    if (!taken[g])
      for (int64_t i = 0; i < size; ++i) choice[g * size + i] = outside;
}

void softmax(float* scores, const float* logits, int64_t count) {
  float largest = logits[0], total = 0;
  for (int64_t i = 1; i < count; ++i) largest = std::fmax(largest, logits[i]);
  for (int64_t i = 0; i < count; ++i) total += scores[i] = std::exp(logits[i] - largest);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// sqrt(log(1 + e^x)), where e^x alone would overflow too.
float root_of_softplus(float x) { return std::sqrt(std::fmax(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)))); }

struct Workspace {
  Scratch scores, choice, sums, kept, taken;
};

void route(const float* logits, const float* bias, const Router& a, float factor, float* weights, int64_t* chosen) {
  static thread_local Workspace memory;
  float* scores = memory.scores.get<float>(a.experts);
  float* choice = memory.choice.get<float>(a.experts);
  char* taken = memory.taken.get<char>(a.experts);
  if (a.kind == grouped_sigmoid)
    for (int64_t e = 0; e < a.experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  else if (a.kind >= sqrt_softplus)
    for (int64_t e = 0; e < a.experts; ++e) scores[e] = root_of_softplus(logits[e]);
  else
    softmax(scores, logits, a.experts);
  for (int64_t e = 0; e < a.experts; ++e) choice[e] = scores[e] + (bias == nullptr ? 0.0f : bias[e]);
  if (a.groups > 1)
    limit_groups(choice, a, memory.sums.get<float>(a.groups), memory.kept.get<int64_t>(a.groups), taken);
  if (a.kind != by_table) pick(choice, a.experts, a.top_k, chosen, taken);
  // Of an expert outside the groups, grouped softmax weighs in nothing; grouped sigmoid never chooses one.
  const float* weighed = a.kind == grouped_softmax ? choice : scores;
  float total = a.kind == plain_softmax || a.kind == grouped_softmax ? 0.0f : 1e-20f;
  for (int64_t i = 0; i < a.top_k; ++i) total += weights[i] = weighed[chosen[i]];
  for (int64_t i = 0; i < a.top_k; ++i) weights[i] = (a.renormalize ? weights[i] / total : weights[i]) * factor;
}

template <typename T, typename W>
void score(const T* hidden, const W* weight, const Router& a, float* logits, int threads) {
  static thread_local Scratch packed;
  int64_t room = padded(a.hidden);
  float* x = packed.get<float>(a.tokens * room);
  for (int64_t t = 0; t < a.tokens; ++t) pack_row(x + t * room, hidden + t * a.stride, a.hidden);
  constexpr int64_t strip = 16;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t e = 0; e < a.experts; e += strip)
    dots(x, room, a.tokens, weight + e * a.hidden, a.hidden, smaller(strip, a.experts - e), a.hidden, logits + e,
         a.experts);
}

template <typename T>
void write(void* out, const float* values, int64_t count) {
  for_each_vector(count, [&](int64_t i, int n) { store_count(static_cast<T*>(out) + i, load_count(values + i, n), n); });
}

}  // namespace
}  // namespace porter

// hidden [T, H] with rows a stride apart, weight [E, H], bias [E] float32 or null -> logits [T, E], weights [T, k],
// indices [T, k]. Logits and weights have out_dtype.
PORTER_EXPORT void porter_router(void* logits, void* weights, int64_t* indices, const void* hidden, const void* weight,
                                 const float* bias, const int64_t* shape, double factor, int32_t dtype,
                                 int32_t weight_dtype, int32_t out_dtype, int32_t threads) {
  using namespace porter;
  Router a{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8]};
  static thread_local Scratch logit_memory, weight_memory;
  float* all_logits = logit_memory.get<float>(a.tokens * a.experts);
  float* all_weights = weight_memory.get<float>(a.tokens * a.top_k);
  dispatch(dtype, [&](auto tag) {
    dispatch(weight_dtype, [&](auto weight_tag) {
      score(static_cast<const decltype(tag)*>(hidden), static_cast<const decltype(weight_tag)*>(weight), a, all_logits,
            threads);
    });
  });
#pragma omp parallel for num_threads(threads) if (threads > 1 && a.tokens > 1) schedule(static)
  for (int64_t t = 0; t < a.tokens; ++t)
    route(all_logits + t * a.experts, bias, a, static_cast<float>(factor), all_weights + t * a.top_k,
          indices + t * a.top_k);
  dispatch(out_dtype, [&](auto tag) {
    write<decltype(tag)>(logits, all_logits, a.tokens * a.experts);
    write<decltype(tag)>(weights, all_weights, a.tokens * a.top_k);
  });
}

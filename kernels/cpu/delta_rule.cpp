// The gated delta rule. Recurrent: the state of a head streams through once to be read and once to be written. Chunked:
// the state stays in the second-level cache, and chunks of tokens meet it in matrix products.
#include "kernels.h"
#include "rows.h"

namespace porter {
namespace {

constexpr int64_t kChunk = 32;
constexpr float kNormEpsilon = 1e-6f;

struct DeltaRule {
  void* out;
  float* next;
  const void *query, *key, *value;
  const float *decay, *beta, *state;  // state null: zeros
  int64_t batch, tokens, key_heads, heads, size, value_size;
  const int64_t* strides;  // query, key, value: (batch, token, head) each; decay, beta: (batch, token) each

  template <typename T>
  const T* row(const void* base, int which, int64_t b, int64_t t, int64_t h) const {
    const int64_t* s = strides + 3 * which;
    return static_cast<const T*>(base) + b * s[0] + t * s[1] + h * s[2];
  }
  float decay_of(int64_t b, int64_t t, int64_t h) const { return decay[b * strides[9] + t * strides[10] + h]; }
  float beta_of(int64_t b, int64_t t, int64_t h) const { return beta[b * strides[11] + t * strides[12] + h]; }
};

// out = x / sqrt(x.x + epsilon) * factor, padded with zeros.
template <typename T>
void normalise(float* out, const T* x, int64_t size, float factor) {
  Vec squares = zero();
  pack_row(out, x, size);
  for (int64_t i = size; i < padded(size); ++i) out[i] = 0;
  for (int64_t i = 0; i < padded(size); i += Vec::width) squares = fma(load(out + i), load(out + i), squares);
  Vec scale = set1(factor / std::sqrt(sum(squares) + kNormEpsilon));
  for (int64_t i = 0; i < padded(size); i += Vec::width) store(out + i, load(out + i) * scale);
}

// ------------------------------------------------------------------------------------------------------- recurrent

// recalled[v] = k . state[:, v] and asked[v] = q . state[:, v] for NV vectors of columns, in one pass over the rows.
template <int NV>
void read_columns(const float* state, int64_t stride, const float* k, const float* q, int64_t size, float* recalled,
                  float* asked, int rest) {
  Vec by_key[NV], by_query[NV];
  for (int v = 0; v < NV; ++v) by_key[v] = by_query[v] = zero();
  for (int64_t i = 0; i < size; ++i) {
    Vec key = set1(k[i]), query = set1(q[i]);
    for (int v = 0; v < NV; ++v) {
      Vec value = load_count(state + i * stride + v * Vec::width, NV == 1 ? rest : Vec::width);
      by_key[v] = fma(key, value, by_key[v]);
      by_query[v] = fma(query, value, by_query[v]);
    }
  }
  for (int v = 0; v < NV; ++v) {
    store(recalled + v * Vec::width, by_key[v]);
    store(asked + v * Vec::width, by_query[v]);
  }
}

void read_state(const float* state, int64_t columns, const float* k, const float* q, int64_t size, float* recalled,
                float* asked) {
  int64_t v = 0;
  for (; v + 8 * Vec::width <= columns; v += 8 * Vec::width)
    read_columns<8>(state + v, columns, k, q, size, recalled + v, asked + v, Vec::width);
  for (; v + 2 * Vec::width <= columns; v += 2 * Vec::width)
    read_columns<2>(state + v, columns, k, q, size, recalled + v, asked + v, Vec::width);
  for (; v < columns; v += Vec::width)
    read_columns<1>(state + v, columns, k, q, size, recalled + v, asked + v,
                    static_cast<int>(smaller(Vec::width, columns - v)));
}

// One token: S' = kept S + k u^T with u = beta (v - kept S^T k), and out = S'^T q = kept S^T q + (k.q) u.
template <typename T>
void step(const DeltaRule& a, int64_t b, int64_t t, int64_t h, const float* state, float* next, float* memory) {
  int64_t room = padded(a.size), columns = a.value_size, wide = padded(columns);
  float *q = memory, *k = q + room, *recalled = k + room, *asked = recalled + wide, *u = asked + wide;
  int64_t key_head = h / (a.heads / a.key_heads);
  normalise(q, a.row<T>(a.query, 0, b, t, key_head), a.size, 1.0f / std::sqrt(static_cast<float>(a.size)));
  normalise(k, a.row<T>(a.key, 1, b, t, key_head), a.size, 1.0f);
  float kept = std::exp(a.decay_of(b, t, h)), beta = a.beta_of(b, t, h);
  if (state == nullptr) std::memset(recalled, 0, 2 * wide * sizeof(float));
  else read_state(state, columns, k, q, a.size, recalled, asked);
  Vec product = zero();
  for (int64_t i = 0; i < room; i += Vec::width) product = fma(load(k + i), load(q + i), product);
  Vec match = set1(sum(product));
  const T* value = a.row<T>(a.value, 2, b, t, h);
  T* out = static_cast<T*>(a.out) + ((b * a.tokens + t) * a.heads + h) * columns;
  for_each_vector(columns, [&](int64_t i, int n) {
    Vec correction = (load_count(value + i, n) - load(recalled + i) * set1(kept)) * set1(beta);
    store(u + i, correction);
    store_count(out + i, fma(match, correction, load(asked + i) * set1(kept)), n);
  });
  for (int64_t i = 0; i < a.size; ++i) {
    Vec key = set1(k[i]);
    for_each_vector(columns, [&](int64_t j, int n) {
      Vec old = state == nullptr ? zero() : load_count(state + i * columns + j, n) * set1(kept);
      store_count(next + i * columns + j, fma(key, load(u + j), old), n);
    });
  }
}

template <typename T>
void recurrent_head(const DeltaRule& a, int64_t b, int64_t h, float* memory) {
  int64_t cells = a.size * a.value_size;
  float* next = a.next + (b * a.heads + h) * cells;
  const float* state = a.state == nullptr ? nullptr : a.state + (b * a.heads + h) * cells;
  for (int64_t t = 0; t < a.tokens; ++t) {
    step<T>(a, b, t, h, state, next, memory);
    state = next;
  }
}

// --------------------------------------------------------------------------------------------------------- chunked

// What a chunk needs, in one thread's scratch. Rows of K or V floats are padded to whole vectors.
struct Chunk {
  int64_t count, room, wide;
  float *q, *k, *turned, *state, *recalled, *out, *u, *system, *scores, *since, *beta;

  Chunk(float* memory, int64_t size, int64_t value_size) : count(0), room(padded(size)), wide(padded(value_size)) {
    auto take = [&](int64_t floats) {
      float* taken = memory;
      memory += floats;
      return taken;
    };
    q = take(kChunk * room), k = take(kChunk * room), turned = take(size * kChunk), state = take(size * wide);
    recalled = take(kChunk * wide), out = take(kChunk * wide), u = take(kChunk * wide);
    system = take(kChunk * kChunk), scores = take(kChunk * kChunk), since = take(kChunk), beta = take(kChunk);
  }
  static int64_t floats(int64_t size, int64_t value_size) {
    int64_t room = padded(size), wide = padded(value_size);
    return 2 * kChunk * room + size * kChunk + size * wide + 3 * kChunk * wide + 2 * kChunk * kChunk + 2 * kChunk;
  }
};

// Row i of both [count, count] matrices of dot products, times exp(since[i] - since[j]); zero past the diagonal.
void decay_row(const Chunk& c, int64_t i) {
  float *system = c.system + i * kChunk, *scores = c.scores + i * kChunk;
  for (int64_t j = 0; j <= i; j += Vec::width) {
    Vec between = exp(vmin(set1(c.since[i]) - load(c.since + j), zero()));
    store(system + j, load(system + j) * between * set1(-c.beta[i]));
    store(scores + j, load(scores + j) * between);
  }
  for (int64_t j = i + 1; j < kChunk; ++j) scores[j] = 0;
}

template <typename T>
void load_chunk(const DeltaRule& a, Chunk& c, int64_t b, int64_t h, int64_t t0) {
  int64_t key_head = h / (a.heads / a.key_heads);
  float factor = 1.0f / std::sqrt(static_cast<float>(a.size)), since = 0;
  c.count = smaller(kChunk, a.tokens - t0);
  for (int64_t i = 0; i < c.count; ++i) {
    normalise(c.q + i * c.room, a.row<T>(a.query, 0, b, t0 + i, key_head), a.size, factor);
    normalise(c.k + i * c.room, a.row<T>(a.key, 1, b, t0 + i, key_head), a.size, 1.0f);
    c.since[i] = since += a.decay_of(b, t0 + i, h);
    c.beta[i] = a.beta_of(b, t0 + i, h);
  }
  for (int64_t i = c.count; i < kChunk; ++i) c.since[i] = since;
  dots(c.k, c.room, c.count, c.k, c.room, c.count, a.size, c.system, kChunk);
  dots(c.q, c.room, c.count, c.k, c.room, c.count, a.size, c.scores, kChunk);
  for (int64_t i = 0; i < c.count; ++i) decay_row(c, i);
}

// u_i = beta_i (v_i - exp(since_i) S^T k_i) - sum over j < i of beta_i exp(since_i - since_j) k_i.k_j u_j
template <typename T>
void correct(const DeltaRule& a, Chunk& c, int64_t b, int64_t h, int64_t t0) {
  for (int64_t i = 0; i < c.count; ++i) {
    const T* value = a.row<T>(a.value, 2, b, t0 + i, h);
    Vec kept = set1(std::exp(c.since[i])), beta = set1(c.beta[i]);
    float *u = c.u + i * c.wide, *recalled = c.recalled + i * c.wide, *out = c.out + i * c.wide;
    for (int64_t j = a.value_size; j < c.wide; ++j) u[j] = 0;
    for_each_vector(a.value_size, [&](int64_t j, int n) {
      store_count(u + j, (load_count(value + j, n) - load(recalled + j) * kept) * beta, n);
      store(out + j, load(out + j) * kept);
    });
    outer(c.system + i * kChunk, kChunk, 1, c.u, c.wide, i, c.wide, u, c.wide);
  }
}

template <typename T>
void write_chunk(const DeltaRule& a, const Chunk& c, int64_t b, int64_t h, int64_t t0) {
  for (int64_t i = 0; i < c.count; ++i) {
    T* out = static_cast<T*>(a.out) + ((b * a.tokens + t0 + i) * a.heads + h) * a.value_size;
    for_each_vector(a.value_size, [&](int64_t j, int n) { store_count(out + j, load(c.out + i * c.wide + j), n); });
  }
}

// S = exp(since_end) S + sum over i of exp(since_end - since_i) k_i u_i^T
void update_state(const DeltaRule& a, Chunk& c) {
  float end = c.since[c.count - 1];
  for (int64_t i = 0; i < c.count; ++i) {
    float to_end = std::exp(end - c.since[i]);
    for (int64_t m = 0; m < a.size; ++m) c.turned[m * kChunk + i] = c.k[i * c.room + m] * to_end;
  }
  Vec kept = set1(std::exp(end));
  for (int64_t i = 0; i < a.size * c.wide; i += Vec::width) store(c.state + i, load(c.state + i) * kept);
  outer(c.turned, kChunk, a.size, c.u, c.wide, c.count, c.wide, c.state, c.wide);
}

template <typename T>
void chunked_head(const DeltaRule& a, int64_t b, int64_t h, float* memory) {
  Chunk c(memory, a.size, a.value_size);
  int64_t cells = a.size * a.value_size;
  std::memset(c.state, 0, a.size * c.wide * sizeof(float));
  if (a.state != nullptr)
    for (int64_t m = 0; m < a.size; ++m)
      std::memcpy(c.state + m * c.wide, a.state + (b * a.heads + h) * cells + m * a.value_size,
                  a.value_size * sizeof(float));
  for (int64_t t0 = 0; t0 < a.tokens; t0 += kChunk) {
    load_chunk<T>(a, c, b, h, t0);
    std::memset(c.recalled, 0, 2 * kChunk * c.wide * sizeof(float));  // recalled and out
    outer(c.k, c.room, c.count, c.state, c.wide, a.size, c.wide, c.recalled, c.wide);
    outer(c.q, c.room, c.count, c.state, c.wide, a.size, c.wide, c.out, c.wide);
    correct<T>(a, c, b, h, t0);
    for (int64_t i = 0; i < c.count; i += 4)
      outer(c.scores + i * kChunk, kChunk, smaller(4, c.count - i), c.u, c.wide, smaller(i + 4, c.count), c.wide,
            c.out + i * c.wide, c.wide);
    write_chunk<T>(a, c, b, h, t0);
    update_state(a, c);
  }
  for (int64_t m = 0; m < a.size; ++m)
    std::memcpy(a.next + (b * a.heads + h) * cells + m * a.value_size, c.state + m * c.wide,
                a.value_size * sizeof(float));
}

}  // namespace
}  // namespace porter

// shape: batch, tokens, key heads, heads, K, V, then strides in elements: query, key, value (batch, token, head), decay,
// beta (batch, token); last dimensions are contiguous. state and next [batch, heads, K, V] and out [batch, tokens,
// heads, V] are contiguous; state null: zeros.
PORTER_EXPORT void porter_delta_rule(void* out, float* next, const void* query, const void* key, const void* value,
                                     const float* decay, const float* beta, const float* state, const int64_t* shape,
                                     int32_t chunked, int32_t dtype, int32_t threads) {
  using namespace porter;
  DeltaRule a{out,      next,     query,    key,      value,    decay,    beta,     state,
              shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape + 6};
  int64_t floats = chunked ? Chunk::floats(a.size, a.value_size) : 2 * padded(a.size) + 3 * padded(a.value_size);
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t item = 0; item < a.batch * a.heads; ++item) {
      static thread_local Scratch memory;
      float* scratch = memory.get<float>(floats);
      if (chunked) chunked_head<T>(a, item / a.heads, item % a.heads, scratch);
      else recurrent_head<T>(a, item / a.heads, item % a.heads, scratch);
    }
  });
}

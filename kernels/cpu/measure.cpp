// What a recording keeps of a tensor: a digest of its memory; its moments and its folded random signs in one pass.
//
// Digest: a tree of NH hashes, see porter/golden/digest.py. Fold: y[i mod m] += s[i] x[i], see porter/golden/sketch.py.
//
// Sums are taken by tiles of a fixed size or eighths of them, added in order: no result depends on the thread count.
#include "abi.h"

#include <type_traits>
#include <vector>

namespace porter {
namespace {

constexpr int64_t kBlock = 4096;      // bytes hashed to four words
constexpr int64_t kTile = 1 << 16;    // elements that share one tile of signs
constexpr int64_t kFoldRows = 16;     // float32 additions before a sum goes on in float64
constexpr int kKeys = 4;

#if defined(__AVX512F__) && defined(__AVX512BW__)
struct Pairs {
  static constexpr int bytes = 64;
  __m512i v;
};
static inline Pairs no_pairs() { return {_mm512_setzero_si512()}; }
static inline Pairs load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline Pairs multiply_add(Pairs sum, Pairs words, Pairs key) {
  __m512i keyed = _mm512_add_epi32(words.v, key.v);
  return {_mm512_add_epi64(sum.v, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)))};
}
static inline uint64_t total(Pairs a) { return static_cast<uint64_t>(_mm512_reduce_add_epi64(a.v)); }
static inline Vec negate_where(Vec x, uint32_t bits) {
  return {_mm512_castsi512_ps(_mm512_mask_xor_epi32(_mm512_castps_si512(x.v), static_cast<__mmask16>(bits),
                                                    _mm512_castps_si512(x.v), _mm512_set1_epi32(INT32_MIN)))};
}
#elif defined(__AVX2__)
struct Pairs {
  static constexpr int bytes = 32;
  __m256i v;
};
static inline Pairs no_pairs() { return {_mm256_setzero_si256()}; }
static inline Pairs load_pairs(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
static inline Pairs multiply_add(Pairs sum, Pairs words, Pairs key) {
  __m256i keyed = _mm256_add_epi32(words.v, key.v);
  return {_mm256_add_epi64(sum.v, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)))};
}
static inline uint64_t total(Pairs a) {
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), a.v);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}
static inline Vec negate_where(Vec x, uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each), each);
  return {_mm256_xor_ps(x.v, _mm256_and_ps(_mm256_castsi256_ps(chosen), _mm256_set1_ps(-0.0f)))};
}
#else
struct Pairs {
  static constexpr int bytes = 8;
  uint64_t v;
};
static inline Pairs no_pairs() { return {0}; }
static inline Pairs load_pairs(const void* p) {
  Pairs pairs;
  std::memcpy(&pairs.v, p, 8);
  return pairs;
}
static inline Pairs multiply_add(Pairs sum, Pairs words, Pairs key) {
  uint64_t low = static_cast<uint32_t>(words.v) + static_cast<uint32_t>(key.v) + uint64_t{0};
  uint64_t high = (words.v >> 32) + (key.v >> 32);
  return {sum.v + (low & 0xffffffffu) * (high & 0xffffffffu)};
}
static inline uint64_t total(Pairs a) { return a.v; }
static inline Vec negate_where(Vec x, uint32_t bits) {
  for (int i = 0; i < Vec::width; ++i) x.v[i] = (bits >> i) & 1 ? -x.v[i] : x.v[i];
  return x;
}
#endif

// A block shorter than kBlock is filled up with zeros to a multiple of 64 bytes, on every processor alike.
static inline void hash_block(uint64_t* out, const unsigned char* block, int64_t bytes, const unsigned char* keys) {
  unsigned char filled[kBlock];
  int64_t end = round_up(bytes, 64);
  if (bytes < end) {
    std::memcpy(filled, block, bytes);
    std::memset(filled + bytes, 0, end - bytes);
    block = filled;
  }
  Pairs sums[kKeys] = {no_pairs(), no_pairs(), no_pairs(), no_pairs()};
  for (int64_t i = 0; i < end; i += Pairs::bytes) {
    Pairs words = load_pairs(block + i);
    for (int k = 0; k < kKeys; ++k) sums[k] = multiply_add(sums[k], words, load_pairs(keys + k * kBlock + i));
  }
  for (int k = 0; k < kKeys; ++k) out[k] = total(sums[k]);
}

struct Moments {
  double least = INFINITY, greatest = -INFINITY, total = 0, squares = 0;
  Vec low = set1(INFINITY), high = set1(-INFINITY);
  double smallest() const { return std::fmin(least, -static_cast<double>(maximum(zero() - low))); }
  double largest() const { return std::fmax(greatest, maximum(high)); }
};

template <typename T>
double to_double(T x) { return static_cast<double>(x); }
double to_double(bf16 x) { return to_float(x); }

// Every sum in float64.
template <typename T>
void add_moments_in_double(Moments& moments, const T* x, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    double v = to_double(x[i]);
    moments.total += v;
    moments.squares += v * v;
    moments.least = v < moments.least ? v : moments.least;
    moments.greatest = v > moments.greatest ? v : moments.greatest;
  }
}

template <typename T>
void add_moments(Moments& moments, const T* x, int64_t size) {
  add_moments_in_double(moments, x, size);
}

// Sums run in float32 over 1024 elements (a few roundings per lane), then in float64; in float64 throughout where a
// square or a sum leaves the range of float32.
template <typename T>
void add_float_moments(Moments& moments, const T* x, int64_t size) {
  constexpr int64_t kRun = 1024;
  for (int64_t start = 0; start < size; start += kRun) {
    int64_t run = smaller(kRun, size - start), i = 0;
    Vec sums[4] = {zero(), zero(), zero(), zero()}, squares[4] = {zero(), zero(), zero(), zero()};
    for (; i + 4 * Vec::width <= run; i += 4 * Vec::width)
      for (int k = 0; k < 4; ++k) {
        Vec v = load(x + start + i + k * Vec::width);
        sums[k] = sums[k] + v;
        squares[k] = fma(v, v, squares[k]);
        moments.low = vmin(moments.low, v);
        moments.high = vmax(moments.high, v);
      }
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    float square = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    bool held = std::isfinite(total) && std::isfinite(square);
    moments.total += held ? total : 0;
    moments.squares += held ? square : 0;
    add_moments_in_double(moments, x + start + (held ? i : 0), held ? run - i : run);
  }
}
void add_moments(Moments& moments, const float* x, int64_t size) { add_float_moments(moments, x, size); }
void add_moments(Moments& moments, const bf16* x, int64_t size) { add_float_moments(moments, x, size); }

static inline uint32_t bits_from(const unsigned char* bits, int64_t place) {
  uint32_t word;
  std::memcpy(&word, bits + (place >> 3), 4);
  return word >> (place & 7);
}

// sums[j] += the signed elements of `rows` (at most kFoldRows) rows of x, which lie `stride` elements apart; bit `place`
// of the signs is that of x[0].
template <typename T>
void fold_rows(double* sums, const T* x, int64_t rows, int64_t stride, int64_t width, const unsigned char* signs,
               int64_t place) {
  constexpr int kGroup = 8;
  float folded[kGroup * Vec::width];
  for (int64_t column = 0; column < width; column += kGroup * Vec::width) {
    int64_t here = smaller(kGroup * Vec::width, width - column);
    Vec group[kGroup];
    for (int k = 0; k < kGroup; ++k) group[k] = zero();
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x + row * stride + column;
      int64_t bit = place + row * stride + column;
      if (here == kGroup * Vec::width) {
        for (int k = 0; k < kGroup; ++k)
          group[k] = group[k] + negate_where(load(from + k * Vec::width), bits_from(signs, bit + k * Vec::width));
      } else {
        for (int k = 0; k * Vec::width < here; ++k) {
          int count = static_cast<int>(smaller(Vec::width, here - k * Vec::width));
          group[k] = group[k] + negate_where(load_count(from + k * Vec::width, count),
                                             bits_from(signs, bit + k * Vec::width));
        }
      }
    }
    for (int k = 0; k < kGroup; ++k) store(folded + k * Vec::width, group[k]);
    for (int64_t j = 0; j < here; ++j) sums[column + j] += folded[j];
  }
}

// The part's sums per bucket, its first element belonging to bucket `first`.
template <typename T>
void fold_part(double* sums, const T* x, int64_t size, int64_t buckets, int64_t first, const unsigned char* signs) {
  for (int64_t j = 0; j < buckets; ++j) sums[j] = 0;
  int64_t head = first == 0 ? 0 : smaller(buckets - first, size);
  if (head > 0) fold_rows(sums + first, x, 1, 0, head, signs, 0);
  int64_t i = head;
  for (; i + buckets <= size; ) {
    int64_t rows = smaller(kFoldRows, (size - i) / buckets);
    fold_rows(sums, x + i, rows, buckets, buckets, signs, i);
    i += rows * buckets;
  }
  if (i < size) fold_rows(sums, x + i, 1, 0, size - i, signs, i);
}

constexpr int64_t kWords = kKeys * sizeof(uint64_t);  // bytes of a block's hash

// Hashes the blocks' hashes until one is left: the words of a tree with these leaves.
void hash_tree(void* words, std::vector<uint64_t>& leaves, const unsigned char* keys) {
  while (leaves.size() > kKeys) {
    keys += kKeys * kBlock;
    int64_t bytes = leaves.size() * sizeof(uint64_t), blocks = divide_up(bytes, kBlock);
    std::vector<uint64_t> above(blocks * kKeys);
    const unsigned char* from = reinterpret_cast<const unsigned char*>(leaves.data());
    for (int64_t block = 0; block < blocks; ++block)
      hash_block(above.data() + kKeys * block, from + block * kBlock, smaller(kBlock, bytes - block * kBlock), keys);
    leaves.swap(above);
  }
  std::memcpy(words, leaves.data(), kWords);
}

// The codes of one_pass.py.
template <typename Body>
static inline void dispatch_any(int32_t code, Body body) {
  switch (code) {
    case 0: return body(float{});
    case 1: return body(bf16{});
    case 2: return body(int8_t{});
    case 3: return body(uint8_t{});
    case 4: return body(int16_t{});
    case 5: return body(int32_t{});
    case 6: return body(int64_t{});
    default: return body(double{});
  }
}

struct Difference {
  double difference = 0, product = 0, first = 0, second = 0;  // sums of (a-b)^2, a b, a^2, b^2
  double largest = 0;                                         // max |a-b|
};

// Products run in float32 over 1024 elements, then in float64.
template <typename A, typename B>
Difference difference_of(const A* a, const B* b, int64_t size) {
  constexpr int64_t kRun = 1024;
  Difference all;
  Vec largest = zero();
  for (int64_t start = 0; start < size; start += kRun) {
    Vec difference = zero(), product = zero(), first = zero(), second = zero();
    for_each_vector(smaller(kRun, size - start), [&](int64_t i, int n) {
      Vec x = load_count(a + start + i, n), y = load_count(b + start + i, n), d = x - y;
      difference = fma(d, d, difference);
      product = fma(x, y, product);
      first = fma(x, x, first);
      second = fma(y, y, second);
      largest = vmax(largest, vabs(d));
    });
    all.difference += sum(difference);
    all.product += sum(product);
    all.first += sum(first);
    all.second += sum(second);
  }
  all.largest = maximum(largest);
  return all;
}

static inline int64_t leaves_of(int64_t bytes) { return bytes == 0 ? 1 : divide_up(bytes, kBlock); }

// A part of a tile block by block, so that each is read from memory once. leaves: the hashes of its blocks.
template <typename T>
void measure_part(Moments& moments, uint64_t* leaves, const T* x, int64_t size, const unsigned char* keys) {
  constexpr int64_t kElements = kBlock / sizeof(T);
  for (int64_t start = 0; start < size; start += kElements) {
    int64_t here = smaller(kElements, size - start);
    hash_block(leaves + start / kElements * kKeys, reinterpret_cast<const unsigned char*>(x + start),
               here * sizeof(T), keys);
    add_moments(moments, x + start, here);
  }
}

}  // namespace
}  // namespace porter

// words: kKeys words. keys: kKeys * kBlock bytes for each level of the tree, whose leaves are blocks of `data`.
PORTER_EXPORT void porter_fingerprint(void* words, const void* data, const void* keys, int64_t bytes,
                                      int32_t threads) {
  using namespace porter;
  const unsigned char *from = static_cast<const unsigned char*>(data), *key = static_cast<const unsigned char*>(keys);
  int64_t blocks = leaves_of(bytes);
  std::vector<uint64_t> leaves(blocks * kKeys);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t block = 0; block < blocks; ++block)
    hash_block(leaves.data() + kKeys * block, from + block * kBlock, smaller(kBlock, bytes - block * kBlock), key);
  hash_tree(words, leaves, key);
}

// words, keys: as porter_fingerprint. moments: minimum, maximum, sum and sum of squares; where the last two are
// not finite, an element is not. folded, for float32 and bfloat16 unless null: `buckets` float32 sums. signs: kTile bits
// and 4 spare bytes. flips: for each tile, a row of divide_up(buckets, 8) bytes whose bit j says that bucket j of the
// tile is subtracted.
PORTER_EXPORT void porter_measure(void* words, void* moments, void* folded, const void* data, const void* keys,
                                  const void* signs, const void* flips, int64_t size, int64_t buckets, int32_t dtype,
                                  int32_t threads) {
  using namespace porter;
  // A few tiles are cut, so that threads share them evenly: the cut depends on the size alone, and so does every sum.
  int64_t cut = size <= 16 * kTile ? 8 : 1, extent = kTile / cut;
  int64_t parts = divide_up(size, extent), row = divide_up(buckets, 8);
  std::vector<Moments> partial(parts);
  std::vector<double> sums(folded == nullptr ? 0 : parts * buckets);
  dispatch_any(dtype, [&](auto tag) {
    using T = decltype(tag);
    std::vector<uint64_t> leaves(leaves_of(size * sizeof(T)) * kKeys);
#pragma omp parallel for num_threads(threads) if (threads > 1 && parts > 1) schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      int64_t start = part * extent, here = smaller(extent, size - start);
      const T* x = static_cast<const T*>(data) + start;
      uint64_t* hashes = leaves.data() + start * sizeof(T) / kBlock * kKeys;
      measure_part(partial[part], hashes, x, here, static_cast<const unsigned char*>(keys));
      if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, float>)
        if (folded != nullptr)
          fold_part(sums.data() + part * buckets, x, here, buckets, start % buckets,
                    static_cast<const unsigned char*>(signs) + part % cut * extent / 8);
    }
    hash_tree(words, leaves, static_cast<const unsigned char*>(keys));
  });
  double least = INFINITY, greatest = -INFINITY, total = 0, squares = 0;
  for (const Moments& m : partial) {
    least = std::fmin(least, m.smallest());
    greatest = std::fmax(greatest, m.largest());
    total += m.total;
    squares += m.squares;
  }
  double* out = static_cast<double*>(moments);
  out[0] = least, out[1] = greatest, out[2] = total, out[3] = squares;
  if (folded == nullptr) return;
  std::vector<double> y(buckets);
  for (int64_t part = 0; part < parts; ++part) {
    const unsigned char* flip = static_cast<const unsigned char*>(flips) + part / cut * row;
    for (int64_t j = 0; j < buckets; ++j) {
      double s = sums[part * buckets + j];
      y[j] += (flip[j >> 3] >> (j & 7)) & 1 ? -s : s;
    }
  }
  for (int64_t j = 0; j < buckets; ++j) static_cast<float*>(folded)[j] = static_cast<float>(y[j]);
}

// out: sums of (a-b)^2, a b, a^2, b^2, and max |a-b|, of float32 or bfloat16 elements.
PORTER_EXPORT void porter_difference(void* out, const void* a, const void* b, int64_t size, int32_t a_dtype,
                                     int32_t b_dtype, int32_t threads) {
  using namespace porter;
  int64_t tiles = divide_up(size, kTile);
  std::vector<Difference> partial(tiles);
  dispatch(a_dtype, [&](auto a_tag) {
    dispatch(b_dtype, [&](auto b_tag) {
      using A = decltype(a_tag);
      using B = decltype(b_tag);
#pragma omp parallel for num_threads(threads) if (threads > 1 && tiles > 1) schedule(static)
      for (int64_t tile = 0; tile < tiles; ++tile)
        partial[tile] = difference_of(static_cast<const A*>(a) + tile * kTile, static_cast<const B*>(b) + tile * kTile,
                                      smaller(kTile, size - tile * kTile));
    });
  });
  Difference all;
  for (const Difference& part : partial) {
    all.difference += part.difference;
    all.product += part.product;
    all.first += part.first;
    all.second += part.second;
    all.largest = std::fmax(all.largest, part.largest);
  }
  std::memcpy(out, &all, sizeof(all));
}

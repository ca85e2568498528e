// Products of weights, [out, in], and a few columns of activations, [in, columns], for XLA:CPU.
//
// Each weight is read from memory once, while all columns use it. Weights of 8 and 4 bits meet columns that are rounded
// to 16, each block of kBlock inputs of a column with its own scale: their products are summed as integers, exactly. Of
// weights of 4 bits, kGroup inputs share a scale and an offset. Floats are summed in kLanes parts, part k of the inputs
// whose number is k modulo kLanes, and the parts are added in one fixed order. So a column's result does not depend on how
// many columns stand beside it, to the last bit.

#ifndef EAGLE_CPU_MATMUL_H_
#define EAGLE_CPU_MATMUL_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_threads.h"

namespace {  // a process may load libraries of several versions

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
constexpr int kMaxSums = 24;  // vectors that stay in registers, of 32
#else
constexpr int kLanes = 8;
constexpr int kMaxSums = 12;  // of 16 with AVX2, of 16 pairs with NEON
#endif

constexpr int kMaxColumns = 64;  // that are multiplied together: bounds the memory that they are transposed to
constexpr int kMaxBlockColumns = 8;
constexpr int kMaxBlockRows = 8;
constexpr size_t kGroup = 32;           // numbers of 4 bits that share a scale and an offset
constexpr size_t kBlock = 1024;          // inputs that share a scale: their sums fit 32 bits on every machine
constexpr float kLargest = 32767;        // of 16 bits, to both sides
constexpr size_t kChunkBytes = 1 << 16;  // of weights, that a thread takes at a time

using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
using Shorts = int16_t __attribute__((vector_size(2 * kLanes * sizeof(int16_t))));

// Adds a product, rounded once where the machine can. Written out: GCC leaves it to the CPU's model and to the loop around
// it whether `sum + a * b` is one operation, so that two shapes could round differently.
inline void MultiplyAdd(Floats& sum, const Floats& a, const Floats& b) {
#if defined(__AVX512BW__)
  sum = Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#elif defined(__FMA__)
  sum = Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(sum)));
#else
  sum += a * b;
#endif
}

// The types that weights are multiplied in: `Input` is a column's, `Sum` holds kLanes sums, and `Vector` the kStep
// numbers that are added to them at a time.
template <typename Weight>
struct Arithmetic;

template <>
struct Arithmetic<float> {
  using Input = float;
  using Vector = Floats;
  using Sum = Floats;
  static constexpr size_t kStep = kLanes;

  static Vector Load(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
  }
  static void Add(Sum& sum, const Vector& w, const Vector& x) { MultiplyAdd(sum, w, x); }
  static Floats ToFloats(const Sum& sum) { return sum; }
};

template <>
struct Arithmetic<int8_t> {
  using Input = int16_t;
  using Vector = Shorts;
  using Sum = Ints;
  static constexpr size_t kStep = 2 * kLanes;

  static Vector Load(const int16_t* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
  }
  static Vector Load(const int8_t* from) {
    using Bytes = int8_t __attribute__((vector_size(kStep)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Vector);
  }
  static void Add(Sum& sum, const Vector& w, const Vector& x) {
#if defined(__AVX512VNNI__)
    sum = Sum(_mm512_dpwssd_epi32(__m512i(sum), __m512i(w), __m512i(x)));
#elif defined(__AVX512BW__)
    sum += Sum(_mm512_madd_epi16(__m512i(w), __m512i(x)));
#elif defined(__AVX2__)
    sum += Sum(_mm256_madd_epi16(__m256i(w), __m256i(x)));
#else
    using Half = int16_t __attribute__((vector_size(sizeof(Vector) / 2)));
    Half w_halves[2], x_halves[2];
    std::memcpy(w_halves, &w, sizeof w);
    std::memcpy(x_halves, &x, sizeof x);
    for (int h = 0; h < 2; ++h) sum += __builtin_convertvector(w_halves[h], Sum) * __builtin_convertvector(x_halves[h], Sum);
#endif
  }
  static Floats ToFloats(const Sum& sum) { return __builtin_convertvector(sum, Floats); }
};

// A byte of two numbers: of a group's 16 bytes, byte i holds number i in its lower half, and number 16 + i in the upper.
struct Nibbles {
  uint8_t pair;
};

template <>
struct Arithmetic<Nibbles> {
  using Input = int16_t;
  static constexpr size_t kVectors = kGroup / (2 * kLanes);  // of a group
  using Group = std::array<Shorts, kVectors>;

  static Group Load(const Nibbles* from) {
    using Bytes = uint8_t __attribute__((vector_size(kGroup / 2)));
    using Half = int16_t __attribute__((vector_size(kGroup)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const Half both = __builtin_convertvector(bytes, Half), low = both & 15, high = both >> 4;
#if defined(__AVX512BW__)
    return {Shorts(_mm512_inserti64x4(_mm512_castsi256_si512(__m256i(low)), __m256i(high), 1))};
#else
    return {low, high};
#endif
  }
};

template <typename Weight>
auto LoadPart(const Weight* from, size_t count) {
  Weight padded[Arithmetic<Weight>::kStep] = {};
  std::memcpy(padded, from, count * sizeof(Weight));
  return Arithmetic<Weight>::Load(padded);
}

// Adds a vector's upper half to its lower half.
template <typename Half, typename Whole>
Half Fold(const Whole& whole) {
  Half halves[2];
  static_assert(sizeof halves == sizeof whole);
  std::memcpy(halves, &whole, sizeof whole);
  return halves[0] + halves[1];
}

using Floats8 = float __attribute__((vector_size(32)));
using Floats4 = float __attribute__((vector_size(16)));
using Floats2 = float __attribute__((vector_size(8)));

inline float AddUp(const Floats& parts) {
#if defined(__AVX512BW__)
  const Floats2 two = Fold<Floats2>(Fold<Floats4>(Fold<Floats8>(parts)));
#else
  const Floats2 two = Fold<Floats2>(Fold<Floats4>(parts));
#endif
  return two[0] + two[1];
}

template <typename Weight>
struct Product {
  const Weight* weight;  // [rows, width]
  const float* scale;    // [rows], factors of the results, null for 1; of 4 bits [rows, groups]
  const float* offset;   // of 4 bits [rows, groups], else null
  size_t rows, width;
  const typename Arithmetic<Weight>::Input* x;  // [columns, x_stride], zeros beyond the width
  size_t x_stride;
  const float* unit;  // [columns, blocks], the scales of the columns
  size_t block, blocks;  // inputs that share a scale, and how many times so many the width is
  const float* sum;      // of 4 bits [columns, blocks, kBlock / kGroup], over the scale, each group's; else null
  int columns;
  float* y;  // of row r and column c at r * y_stride + c * y_step
  size_t y_stride, y_step;
};

// Some rows times some columns, all sums of a block in registers.
template <typename Weight, int kRows, int kColumns>
void MultiplyBlock(const Product<Weight>& p, size_t row, int column) {
  using A = Arithmetic<Weight>;
  const Weight* weight = p.weight + row * p.width;
  const auto* x = p.x + column * p.x_stride;
  Floats total[kRows][kColumns] = {};
  for (size_t b = 0; b < p.blocks; ++b) {
    const size_t begin = b * p.block, end = std::min(begin + p.block, p.width);
    typename A::Sum sum[kRows][kColumns] = {};
    const auto add = [&](size_t i, const auto& load) {
      typename A::Vector w[kRows];
      for (int r = 0; r < kRows; ++r) {
        __builtin_prefetch(weight + (kRows + r) * p.width + i);
        w[r] = load(weight + r * p.width + i);
      }
      for (int c = 0; c < kColumns; ++c) {
        const auto x_c = A::Load(x + c * p.x_stride + i);
        for (int r = 0; r < kRows; ++r) A::Add(sum[r][c], w[r], x_c);
      }
    };
    const size_t whole = end - (end - begin) % A::kStep;
    for (size_t i = begin; i < whole; i += A::kStep) add(i, [](const Weight* from) { return A::Load(from); });
    if (whole < end) add(whole, [&](const Weight* from) { return LoadPart(from, end - whole); });
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        MultiplyAdd(total[r][c], A::ToFloats(sum[r][c]), Floats{} + p.unit[(column + c) * p.blocks + b]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const float scale = p.scale == nullptr ? 1 : p.scale[row + r];
    for (int c = 0; c < kColumns; ++c) p.y[(row + r) * p.y_stride + (column + c) * p.y_step] = AddUp(total[r][c]) * scale;
  }
}

// The same with weights of 4 bits.
template <int kRows, int kColumns>
void MultiplyGroups(const Product<Nibbles>& p, size_t row, int column) {
  using A = Arithmetic<Nibbles>;
  constexpr size_t kGroups = kBlock / kGroup, kBytes = kGroup / 2;
  const size_t groups = p.width / kGroup;
  const Nibbles* weight = p.weight + row * groups * kBytes;
  const float *scale = p.scale + row * groups, *offset = p.offset + row * groups;
  Floats total[kRows][kColumns] = {};
  for (size_t b = 0; b < p.blocks; ++b) {
    const size_t begin = b * kGroups, end = std::min(begin + kGroups, groups);
    Floats sum[kRows][kColumns] = {};
    for (size_t g = begin; g < end; ++g) {
      A::Group w[kRows];
      Floats factor[kRows];
      for (int r = 0; r < kRows; ++r) {
        __builtin_prefetch(weight + ((kRows + r) * groups + g) * kBytes);
        w[r] = A::Load(weight + (r * groups + g) * kBytes);
        factor[r] = Floats{} + scale[r * groups + g];
      }
      for (int c = 0; c < kColumns; ++c) {
        const int16_t* x = p.x + (column + c) * p.x_stride + g * kGroup;
        for (int r = 0; r < kRows; ++r) {
          Ints products{};
          for (size_t v = 0; v < A::kVectors; ++v) {
            Arithmetic<int8_t>::Add(products, w[r][v], Arithmetic<int8_t>::Load(x + v * 2 * kLanes));
          }
          MultiplyAdd(sum[r][c], Arithmetic<int8_t>::ToFloats(products), factor[r]);
        }
      }
    }
    for (size_t g = begin; g < end; g += kLanes) {
      for (int r = 0; r < kRows; ++r) {
        // Those of the next output may follow, for which sums are 0.
        const size_t at = r * groups + g, left = (p.rows - row) * groups - at;
        const Floats of_groups = left >= kLanes ? Arithmetic<float>::Load(offset + at) : LoadPart(offset + at, left);
        for (int c = 0; c < kColumns; ++c) {
          const float* x_sum = p.sum + (column + c) * p.blocks * kGroups + g;
          MultiplyAdd(sum[r][c], of_groups, Arithmetic<float>::Load(x_sum));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        MultiplyAdd(total[r][c], sum[r][c], Floats{} + p.unit[(column + c) * p.blocks + b]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) p.y[(row + r) * p.y_stride + (column + c) * p.y_step] = AddUp(total[r][c]);
  }
}

template <typename Weight, int kColumns>
constexpr int BlockRows() {
  constexpr bool kIsGrouped = std::is_same_v<Weight, Nibbles>;  // whose scales need registers, too
  return std::clamp((kIsGrouped ? kMaxSums * 2 / 3 : kMaxSums) / kColumns, 1, kIsGrouped ? 4 : kMaxBlockRows);
}

template <typename Weight, int kRows, int kColumns>
void MultiplySome(const Product<Weight>& p, size_t row, int column) {
  if constexpr (std::is_same_v<Weight, Nibbles>) {
    MultiplyGroups<kRows, kColumns>(p, row, column);
  } else {
    MultiplyBlock<Weight, kRows, kColumns>(p, row, column);
  }
}

// Rows `begin` to `end` times `kColumns` columns from `column` on.
template <typename Weight, int kColumns>
void MultiplyRows(const Product<Weight>& p, size_t begin, size_t end, int column) {
  constexpr int kRows = BlockRows<Weight, kColumns>();
  size_t row = begin;
  for (; row + kRows <= end; row += kRows) MultiplySome<Weight, kRows, kColumns>(p, row, column);
  for (; row < end; ++row) MultiplySome<Weight, 1, kColumns>(p, row, column);
}

template <typename Weight>
using RowsFunction = void (*)(const Product<Weight>&, size_t, size_t, int);

template <typename Weight, int... kCounts>
constexpr auto RowsFunctions(std::integer_sequence<int, kCounts...>) {
  return std::array<RowsFunction<Weight>, sizeof...(kCounts)>{MultiplyRows<Weight, kCounts + 1>...};
}

template <typename Weight>
void MultiplyChunk(const Product<Weight>& p, size_t begin, size_t end) {
  static constexpr auto kFunctions = RowsFunctions<Weight>(std::make_integer_sequence<int, kMaxBlockColumns>{});
  const int blocks = (p.columns + kMaxBlockColumns - 1) / kMaxBlockColumns;
  // A few rows at a time, so that the second block of columns finds them in the nearest cache.
  const size_t few = blocks == 1 ? end - begin : 6;
  for (size_t row = begin; row < end; row += few) {
    int column = 0;
    for (int block = 0; block < blocks; ++block) {
      const int count = (p.columns - column) / (blocks - block);
      kFunctions[count - 1](p, row, std::min(end, row + few), column);
      column += count;
    }
  }
}

template <typename Weight>
void Multiply(ffi::ThreadPool pool, const Product<Weight>& p) {
  const size_t row_bytes = p.width * sizeof(Weight);
  const size_t rows = std::max<size_t>(1, kChunkBytes / row_bytes / 24) * 24;
  InParallel(pool, (p.rows + rows - 1) / rows, [&](size_t i) {
    MultiplyChunk(p, i * rows, std::min(p.rows, (i + 1) * rows));
  });
}

// Rounds a block of a column to 16 bits, and returns its scale. Of a block that holds infinities or NaN it is NaN.
float Round(const float* x, size_t count, int16_t* rounded) {
  float largest = 0, poison = 0;
  for (size_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::abs(x[i]));
    poison += x[i] * 0;
  }
  const float factor = largest > 1e-30f && poison == 0 ? kLargest / largest : 0;
  for (size_t i = 0; i < count; ++i) rounded[i] = static_cast<int16_t>(factor == 0 ? 0 : std::nearbyint(x[i] * factor));
  return largest / kLargest + poison;
}

// What one thread needs beside its results, kept from call to call.
struct Scratch {
  std::vector<Floats> x;  // aligned as vectors are
  std::vector<Shorts> rounded;
  std::vector<float> unit, sum;
};

void MultiplyColumns(ffi::ThreadPool pool, const float* weight, Scratch& scratch, Product<float> p) {
  scratch.unit.assign(p.columns, 1);
  p.weight = weight, p.unit = scratch.unit.data(), p.block = p.width, p.blocks = 1;
  Multiply(pool, p);
}

// Rounds all columns, for weights that are integers.
template <typename Weight>
Product<Weight> RoundColumns(const Weight* weight, Scratch& scratch, const Product<float>& floats) {
  const size_t blocks = (floats.width + kBlock - 1) / kBlock, steps = (floats.x_stride + 2 * kLanes - 1) / (2 * kLanes);
  const size_t stride = steps * 2 * kLanes;
  scratch.rounded.assign(steps * floats.columns, Shorts{});
  scratch.unit.resize(blocks * floats.columns);
  int16_t* rounded = reinterpret_cast<int16_t*>(scratch.rounded.data());
  for (int c = 0; c < floats.columns; ++c) {
    for (size_t b = 0; b < blocks; ++b) {
      const size_t begin = b * kBlock, count = std::min(kBlock, floats.width - begin);
      scratch.unit[c * blocks + b] = Round(floats.x + c * floats.x_stride + begin, count, rounded + c * stride + begin);
    }
  }
  Product<Weight> p{};
  p.weight = weight, p.scale = floats.scale, p.offset = floats.offset, p.rows = floats.rows, p.width = floats.width;
  p.x = rounded, p.x_stride = stride, p.unit = scratch.unit.data(), p.block = kBlock, p.blocks = blocks;
  p.columns = floats.columns, p.y = floats.y, p.y_stride = floats.y_stride, p.y_step = floats.y_step;
  return p;
}

void MultiplyColumns(ffi::ThreadPool pool, const int8_t* weight, Scratch& scratch, const Product<float>& floats) {
  Multiply(pool, RoundColumns(weight, scratch, floats));
}

void MultiplyColumns(ffi::ThreadPool pool, const Nibbles* weight, Scratch& scratch, const Product<float>& floats) {
  Product<Nibbles> p = RoundColumns(weight, scratch, floats);
  const size_t groups = p.blocks * (kBlock / kGroup);  // with those beyond the width, whose sums are 0
  scratch.sum.assign(p.columns * groups, 0);
  for (int c = 0; c < p.columns; ++c) {
    for (size_t i = 0; i < p.width; ++i) scratch.sum[c * groups + i / kGroup] += p.x[c * p.x_stride + i];
  }
  p.sum = scratch.sum.data();
  Multiply(pool, p);
}

template <typename Weight>
void MultiplyAll(ffi::ThreadPool pool, const void* weight, const float* scale, const float* offset, size_t rows,
                 size_t width, const float* x, int columns, float* y) {
  thread_local Scratch scratch;
  const size_t vectors = (width + kLanes - 1) / kLanes, stride = vectors * kLanes;
  for (int first = 0; first < columns; first += kMaxColumns) {
    const int count = std::min(kMaxColumns, columns - first);
    scratch.x.assign(vectors * count, Floats{});
    float* transposed = reinterpret_cast<float*>(scratch.x.data());
    for (size_t i = 0; i < width; ++i) {
      for (int c = 0; c < count; ++c) transposed[c * stride + i] = x[i * columns + first + c];
    }
    Product<float> p{};
    p.scale = scale, p.offset = offset, p.rows = rows, p.width = width;
    p.x = transposed, p.x_stride = stride, p.columns = count;
    p.y = y + first, p.y_stride = columns, p.y_step = 1;
    MultiplyColumns(pool, static_cast<const Weight*>(weight), scratch, p);
  }
}

}  // namespace

#endif  // EAGLE_CPU_MATMUL_H_

// Products of weights, [out, in], and a few columns of activations, [in, columns], for XLA:CPU.
//
// Each weight is read from memory once, while all columns use it. Sums are made in kLanes parts, part k of the inputs
// whose number is k modulo kLanes, and the parts are added in one fixed order. So a column's result does not depend on
// how many columns stand beside it, to the last bit.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxSums = 24;  // vectors that stay in registers, of 32
#else
constexpr int kLanes = 8;
constexpr int kMaxSums = 12;  // of 16 with AVX2, of 16 pairs with NEON
#endif

constexpr int kMaxColumns = 64;  // that are multiplied together: bounds the memory that they are transposed to
constexpr int kMaxBlockColumns = 8;
constexpr int kMaxBlockRows = 8;
constexpr size_t kChunkBytes = 1 << 16;  // of weights, that a thread takes at a time
constexpr int kSpins = 4096;             // before a waiting thread lets others run

using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));

inline Floats Load(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

inline Floats Load(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  using Bytes = int8_t __attribute__((vector_size(kLanes)));
  using Shorts = int16_t __attribute__((vector_size(kLanes * sizeof(int16_t))));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Shorts), Floats);
#endif
}

template <typename Weight>
Floats LoadPart(const Weight* from, size_t count) {
  Weight padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(Weight));
  return Load(padded);
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
#if defined(__AVX512F__)
  const Floats2 two = Fold<Floats2>(Fold<Floats4>(Fold<Floats8>(parts)));
#else
  const Floats2 two = Fold<Floats2>(Fold<Floats4>(parts));
#endif
  return two[0] + two[1];
}

struct Product {
  const void* weight;  // [rows, width]
  size_t rows, width;
  const float* x;  // [columns, x_stride], zeros beyond the width
  size_t x_stride;
  int columns;
  float* y;  // [rows, y_stride]
  size_t y_stride;
};

// Some rows times some columns, all sums in registers.
template <typename Weight, int kRows, int kColumns>
void MultiplyBlock(const Product& p, size_t row, int column) {
  const Weight* weight = static_cast<const Weight*>(p.weight) + row * p.width;
  const float* x = p.x + column * p.x_stride;
  Floats sum[kRows][kColumns] = {};
  const auto add = [&](size_t i, const auto& load) {
    Floats w[kRows];
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(weight + (kRows + r) * p.width + i);
      w[r] = load(weight + r * p.width + i);
    }
    for (int c = 0; c < kColumns; ++c) {
      const Floats x_c = Load(x + c * p.x_stride + i);
      for (int r = 0; r < kRows; ++r) sum[r][c] += w[r] * x_c;
    }
  };
  const size_t whole = p.width - p.width % kLanes;
  for (size_t i = 0; i < whole; i += kLanes) add(i, [](const Weight* from) { return Load(from); });
  if (whole < p.width) add(whole, [&](const Weight* from) { return LoadPart(from, p.width - whole); });
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) p.y[(row + r) * p.y_stride + column + c] = AddUp(sum[r][c]);
  }
}

template <int kColumns>
constexpr int BlockRows() {
  return std::min(kMaxBlockRows, std::max(1, kMaxSums / kColumns));
}

// Rows `begin` to `end` times `kColumns` columns from `column` on.
template <typename Weight, int kColumns>
void MultiplyRows(const Product& p, size_t begin, size_t end, int column) {
  constexpr int kRows = BlockRows<kColumns>();
  size_t row = begin;
  for (; row + kRows <= end; row += kRows) MultiplyBlock<Weight, kRows, kColumns>(p, row, column);
  for (; row < end; ++row) MultiplyBlock<Weight, 1, kColumns>(p, row, column);
}

using RowsFunction = void (*)(const Product&, size_t, size_t, int);

template <typename Weight, int... kCounts>
constexpr auto RowsFunctions(std::integer_sequence<int, kCounts...>) {
  return std::array<RowsFunction, sizeof...(kCounts)>{MultiplyRows<Weight, kCounts + 1>...};
}

template <typename Weight>
void MultiplyChunk(const Product& p, size_t begin, size_t end) {
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

// What threads share. It outlives the call: a task may begin when all chunks are taken and the call has returned, and
// then touches nothing else.
struct Shared {
  std::atomic<size_t> next{0}, done{0};
};

// Runs `chunk(0)` to `chunk(count - 1)`, here and on the pool's threads. Waits for chunks that a thread has begun, and
// never for a task that none has.
void InParallel(ffi::ThreadPool pool, size_t count, const std::function<void(size_t)>& chunk) {
  const size_t helpers = std::min<size_t>(count, std::max<int64_t>(pool.num_threads(), 1)) - 1;
  if (helpers == 0) {
    for (size_t i = 0; i < count; ++i) chunk(i);
    return;
  }
  const auto shared = std::make_shared<Shared>();
  const auto work = [shared, count, &chunk] {
    for (size_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      chunk(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (size_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spin = 0; shared->done.load(std::memory_order_acquire) < count; ++spin) {
    if (spin >= kSpins) std::this_thread::yield();
  }
}

template <typename Weight>
void Multiply(ffi::ThreadPool pool, const Product& p) {
  const size_t row_bytes = p.width * sizeof(Weight);
  const size_t rows = std::max<size_t>(1, kChunkBytes / row_bytes / 24) * 24;
  InParallel(pool, (p.rows + rows - 1) / rows, [&](size_t i) {
    MultiplyChunk<Weight>(p, i * rows, std::min(p.rows, (i + 1) * rows));
  });
}

template <typename Weight>
void MultiplyAll(ffi::ThreadPool pool, const void* weight, size_t rows, size_t width, const float* x, int columns,
                 float* y) {
  thread_local std::vector<Floats> scratch;  // aligned as vectors are
  const size_t vectors = (width + kLanes - 1) / kLanes, stride = vectors * kLanes;
  for (int first = 0; first < columns; first += kMaxColumns) {
    const int count = std::min(kMaxColumns, columns - first);
    scratch.assign(vectors * count, Floats{});
    float* transposed = reinterpret_cast<float*>(scratch.data());
    for (size_t i = 0; i < width; ++i) {
      for (int c = 0; c < count; ++c) transposed[c * stride + i] = x[i * columns + first + c];
    }
    Multiply<Weight>(pool, Product{weight, rows, width, transposed, stride, count, y + first, size_t(columns)});
  }
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer weight, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  if (shape.size() != 2 || shape[0] < 1 || weight.dimensions().size() < 2 || weight.dimensions().back() != shape[0]) {
    return ffi::Error::InvalidArgument("needed are weights [..., in] and columns [in, columns]");
  }
  const size_t width = shape[0], rows = weight.element_count() / width;
  const auto multiply = weight.element_type() == ffi::F32  ? MultiplyAll<float>
                        : weight.element_type() == ffi::S8 ? MultiplyAll<int8_t>
                                                           : nullptr;
  if (multiply == nullptr) return ffi::Error::InvalidArgument("weights are float32 or int8");
  multiply(pool, weight.untyped_data(), rows, width, x.typed_data(), shape[1], y->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle_matmul, Handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// Attention of a few queries to the committed entries of a cache, and to new entries beside it, for XLA:CPU.
//
// Threads share the entries in parts. Of each part a query has a row: its largest score, the sum of its weights relative
// to that, and the sum of the values that they weigh (FlashAttention, arXiv:2205.14135). At the end the rows of all parts
// are added. No slot past a sequence's length is read.

#ifndef EAGLE_CPU_ATTENTION_H_
#define EAGLE_CPU_ATTENTION_H_

#include <cfloat>
#include <limits>

#include "cpu_matmul.h"

namespace {

constexpr size_t kEntries = 64;   // scored at a time: their keys and values stay in the nearest cache
constexpr size_t kMinPart = 128;  // slots
constexpr size_t kMaxParts = 16;  // of the slots of a sequence
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the score of an entry that a query does not see

struct Attention {
  size_t batch, kv_heads, heads, tokens;  // `heads` of a key-value head
  size_t entries, slots, width;           // new entries, slots of the cache, numbers of a key
  const float* query;                     // [batch, kv_heads, heads, tokens, width]
  const float *new_key, *new_value;       // [batch, kv_heads, entries, width]
  const bool* mask;                       // [batch, tokens, entries], which new entries a query sees
  const float *key, *value;               // [batch, kv_heads, slots, width]
  const int32_t* length;                  // [batch], committed entries
  const int32_t* oldest;                  // [batch, tokens], the first slot that a query sees
  const float* sink;                      // [kv_heads, heads], a score without a value
  float* out;                             // as the queries

  size_t queries() const { return heads * tokens; }  // of a key-value head
  size_t vectors() const { return (width + kLanes - 1) / kLanes; }
  size_t row() const { return 1 + vectors(); }
};

// A row is 1 + vectors() vectors: the first begins with the largest score and the sum of the weights.
inline float& Best(Floats* row) { return reinterpret_cast<float*>(row)[0]; }
inline float& Sum(Floats* row) { return reinterpret_cast<float*>(row)[1]; }

// exp(x) of numbers that are not positive, to 1e-7 of it; 0 below -87.
inline Floats Exp(const Floats& x) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: what it is added to becomes a whole number
  const Floats shifted = x * 1.44269504f + kRound, power = shifted - kRound;
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats sum = Floats{} + 1.9875691500e-4f;
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = sum * rest + next;
  }
  const Ints two_to_power = (Ints(shifted) - Ints(Floats{} + kRound) + 127) << 23;
  return x < -87.0f ? Floats{} : (sum * rest * rest + rest + 1.0f) * Floats(two_to_power);
}

inline float Exp(float x) { return Exp(Floats{} + x)[0]; }

// Adds values times their weights to `kVectors` vectors of a row.
template <int kVectors>
void AddValues(const float* weight, const float* value, size_t count, size_t width, Floats* total) {
  Floats sum[kVectors];
  std::memcpy(sum, total, sizeof sum);
  for (size_t i = 0; i < count; ++i) {
    const Floats w = Floats{} + weight[i];
    for (int v = 0; v < kVectors; ++v) MultiplyAdd(sum[v], w, Arithmetic<float>::Load(value + i * width + v * kLanes));
  }
  std::memcpy(total, sum, sizeof sum);
}

inline void AddAllValues(const float* weight, const float* value, size_t count, size_t width, Floats* total) {
  const size_t whole = width / kLanes, tail = width % kLanes;
  size_t v = 0;
  const auto add = [&](auto function, size_t vectors) {
    for (; v + vectors <= whole; v += vectors) function(weight, value + v * kLanes, count, width, total + v);
  };
  add(AddValues<8>, 8), add(AddValues<4>, 4), add(AddValues<2>, 2), add(AddValues<1>, 1);
  for (size_t i = 0; tail > 0 && i < count; ++i) {
    MultiplyAdd(total[v], Floats{} + weight[i], LoadPart(value + i * width + v * kLanes, tail));
  }
}

// Adds entries to a query's row. Their scores, in whole vectors, become weights.
inline void AddEntries(const Attention& a, Floats* score, const float* value, size_t count, Floats* row) {
  const size_t vectors = (count + kLanes - 1) / kLanes;
  Floats largest = Floats{} + Best(row);
  for (size_t v = 0; v < vectors; ++v) largest = score[v] > largest ? score[v] : largest;
  float best = Best(row);
  for (int lane = 0; lane < kLanes; ++lane) best = std::max(best, largest[lane]);
  if (best > Best(row)) {
    const float factor = Exp(Best(row) - best);
    Best(row) = best, Sum(row) *= factor;
    for (size_t v = 1; v < a.row(); ++v) row[v] *= factor;
  }
  Floats sum{};
  for (size_t v = 0; v < vectors; ++v) sum += score[v] = Exp(score[v] - best);
  Sum(row) += AddUp(sum);
  AddAllValues(reinterpret_cast<const float*>(score), value, count, a.width, row + 1);
}

// Adds entries to the rows of all queries of a key-value head. `hide(query, first, count, score)` hides some of them.
template <typename Hide>
void AddToAll(const Attention& a, const Floats* query, const float* key, const float* value, size_t count,
              const Hide& hide, Floats* rows) {
  thread_local std::vector<Floats> scores;
  thread_local std::vector<float> unit;
  constexpr size_t kVectors = kEntries / kLanes;
  scores.resize(a.queries() * kVectors);
  unit.assign(a.queries(), 1 / std::sqrt(static_cast<float>(a.width)));
  float* score = reinterpret_cast<float*>(scores.data());
  for (size_t first = 0; first < count; first += kEntries) {
    const size_t some = std::min(kEntries, count - first);
    Product<float> p{};
    p.weight = key + first * a.width, p.rows = some, p.width = a.width;
    p.x = reinterpret_cast<const float*>(query), p.x_stride = a.vectors() * kLanes;
    p.unit = unit.data(), p.block = a.width, p.blocks = 1, p.columns = a.queries();
    p.y = score, p.y_stride = 1, p.y_step = kEntries;
    MultiplyChunk(p, 0, some);
    for (size_t q = 0; q < a.queries(); ++q) {
      hide(q, first, some, score + q * kEntries);
      std::fill(score + q * kEntries + some, score + (q + 1) * kEntries, kHidden);
      AddEntries(a, &scores[q * kVectors], value + first * a.width, some, rows + q * a.row());
    }
  }
}

// Adds the slots from `begin` to `end` of a sequence and key-value head.
inline void AddSlots(const Attention& a, size_t b, size_t g, const Floats* query, size_t begin, size_t end,
                     Floats* rows) {
  const int32_t* oldest = a.oldest + b * a.tokens;
  const int32_t first_seen = *std::min_element(oldest, oldest + a.tokens);
  begin = std::max<int64_t>(begin, first_seen);
  if (begin >= end) return;
  const auto hide = [&](size_t q, size_t first, size_t count, float* score) {
    const int64_t hidden = oldest[q % a.tokens] - static_cast<int64_t>(begin + first);
    std::fill_n(score, std::clamp<int64_t>(hidden, 0, count), kHidden);
  };
  const size_t at = ((b * a.kv_heads + g) * a.slots + begin) * a.width;
  AddToAll(a, query, a.key + at, a.value + at, end - begin, hide, rows);
}

inline void AddNew(const Attention& a, size_t b, size_t g, const Floats* query, Floats* rows) {
  const auto hide = [&](size_t q, size_t first, size_t count, float* score) {
    const bool* sees = a.mask + (b * a.tokens + q % a.tokens) * a.entries + first;
    for (size_t i = 0; i < count; ++i) score[i] = sees[i] ? score[i] : kHidden;
  };
  const size_t at = (b * a.kv_heads + g) * a.entries * a.width;
  AddToAll(a, query, a.new_key + at, a.new_value + at, a.entries, hide, rows);
}

// Adds up a query's rows, one a part, and writes what it attends to; zeros for a query that sees nothing.
inline void Combine(const Attention& a, Floats* row, size_t parts, size_t stride, float sink, float* out) {
  float best = sink;
  for (size_t p = 0; p < parts; ++p) best = std::max(best, Best(row + p * stride));
  float sum = Exp(sink - best);
  Floats* total = row + 1;  // of the first part
  for (size_t p = 0; p < parts; ++p) {
    Floats* part = row + p * stride;
    const float factor = Exp(Best(part) - best);
    sum += Sum(part) * factor;
    for (size_t v = 0; v < a.vectors(); ++v) total[v] = (p == 0 ? Floats{} : total[v]) + part[1 + v] * factor;
  }
  const float* numbers = reinterpret_cast<const float*>(total);
  for (size_t k = 0; k < a.width; ++k) out[k] = sum == 0 ? 0 : numbers[k] / sum;
}

inline void Attend(ffi::ThreadPool pool, const Attention& a) {
  const size_t pairs = a.batch * a.kv_heads, queries = a.queries(), vectors = a.vectors();
  const auto length = [&](size_t b) { return std::clamp<int64_t>(a.length[b], 0, a.slots); };
  size_t longest = 0;
  for (size_t b = 0; b < a.batch; ++b) longest = std::max<size_t>(longest, length(b));
  const size_t least = std::max(kMinPart, (longest + kMaxParts - 1) / kMaxParts);
  const size_t size = (least + kEntries - 1) / kEntries * kEntries;
  const size_t parts = (longest + size - 1) / size + 1;  // the last one holds the new entries

  thread_local std::vector<Floats> query, rows;  // aligned as vectors are
  query.assign(pairs * queries * vectors, Floats{});
  for (size_t q = 0; q < pairs * queries; ++q) std::memcpy(&query[q * vectors], a.query + q * a.width, a.width * 4);
  rows.assign(pairs * parts * queries * a.row(), Floats{});
  for (size_t r = 0; r < rows.size(); r += a.row()) Best(&rows[r]) = -FLT_MAX;

  Floats *const first_row = rows.data(), *const first_query = query.data();  // this thread's, for all
  const size_t stride = queries * a.row();
  InParallel(pool, pairs * parts, [&](size_t i) {
    const size_t pair = i / parts, part = i % parts, b = pair / a.kv_heads, g = pair % a.kv_heads;
    const Floats* own = first_query + pair * queries * vectors;
    if (part + 1 < parts) {
      AddSlots(a, b, g, own, part * size, std::min<size_t>((part + 1) * size, length(b)), first_row + i * stride);
    } else {
      AddNew(a, b, g, own, first_row + i * stride);
    }
  });
  for (size_t q = 0; q < pairs * queries; ++q) {
    const size_t pair = q / queries, head = q % queries / a.tokens;
    Combine(a, first_row + pair * parts * stride + q % queries * a.row(), parts, stride,
            a.sink[pair % a.kv_heads * a.heads + head], a.out + q * a.width);
  }
}

}  // namespace

#endif  // EAGLE_CPU_ATTENTION_H_

// Attention of a few queries to the committed entries of a cache, and to new entries beside it, for XLA:CPU.
//
// Threads share the entries in parts. Of each part a query has a row: its largest score, the sum of its weights relative
// to that, and the sum of the values that they weigh (FlashAttention, arXiv:2205.14135). At the end the rows of all parts
// are added. No slot past a sequence's length is read.
//
// What is added to what depends on the entries' positions in the text alone: on neither how many of them are committed,
// nor what else is new. So a node of a tree gets the very bits that plain decoding would give it.

#ifndef EAGLE_CPU_ATTENTION_H_
#define EAGLE_CPU_ATTENTION_H_

#include <cfloat>
#include <limits>

#include "cpu_matmul.h"

namespace {

constexpr size_t kEntries = 64;  // positions scored at a time: their keys and values stay in the nearest cache
constexpr size_t kPart = 128;    // positions
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

// Turns the scores of kEntries positions into weights, relative to the largest of a query's row, and adds them to it.
inline void Weigh(const Attention& a, Floats* score, Floats* row) {
  constexpr size_t kVectors = kEntries / kLanes;
  Floats largest = score[0];
  for (size_t v = 1; v < kVectors; ++v) largest = score[v] > largest ? score[v] : largest;
  float best = Best(row);
  for (int lane = 0; lane < kLanes; ++lane) best = std::max(best, largest[lane]);
  if (best > Best(row)) {
    const float factor = Exp(Best(row) - best);
    Best(row) = best, Sum(row) *= factor;
    for (size_t v = 1; v < a.row(); ++v) row[v] *= factor;
  }
  Floats sum{};
  for (size_t v = 0; v < kVectors; ++v) sum += score[v] = Exp(score[v] - best);
  Sum(row) += AddUp(sum);
}

// Scores keys for all queries of a key-value head: of query q and key i at score[q * stride + i].
inline void Score(const Attention& a, const Floats* query, const float* key, size_t count, float* score, size_t stride) {
  thread_local std::vector<float> unit;
  unit.assign(a.queries(), 1 / std::sqrt(static_cast<float>(a.width)));
  Product<float> p{};
  p.weight = key, p.rows = count, p.width = a.width;
  p.x = reinterpret_cast<const float*>(query), p.x_stride = a.vectors() * kLanes;
  p.unit = unit.data(), p.block = a.width, p.blocks = 1, p.columns = a.queries();
  p.y = score, p.y_stride = 1, p.y_step = stride;
  MultiplyChunk(p, 0, count);
}

// What a thread works on for one sequence and key-value head.
struct Head {
  const Floats* query;  // [queries, vectors], zeros beyond the width
  const float *key, *value, *new_key, *new_value;
  const bool* mask;
  const int32_t* oldest;
  size_t length;
  Floats* rows;  // [parts, queries, row]
};

// Scores the slots of the kEntries positions from `first` on, hides what is not seen, and returns how many they are.
inline size_t ScoreSlots(const Attention& a, const Head& h, size_t first, float* score) {
  const size_t count = std::clamp<int64_t>(static_cast<int64_t>(h.length) - first, 0, kEntries);
  Score(a, h.query, h.key + first * a.width, count, score, kEntries);
  for (size_t q = 0; q < a.queries(); ++q) {
    const int64_t hidden = h.oldest[q % a.tokens] - static_cast<int64_t>(first);
    std::fill_n(score + q * kEntries, std::clamp<int64_t>(hidden, 0, count), kHidden);
    std::fill(score + q * kEntries + count, score + (q + 1) * kEntries, kHidden);
  }
  return count;
}

// Adds the slots of a part that holds nothing else.
inline void AddSlots(const Attention& a, const Head& h, size_t part) {
  thread_local std::vector<Floats> scores;
  scores.resize(a.queries() * kEntries / kLanes);
  float* score = reinterpret_cast<float*>(scores.data());
  const int64_t seen = std::max(0, *std::min_element(h.oldest, h.oldest + a.tokens));
  for (size_t first = std::max<size_t>(part * kPart, seen / kEntries * kEntries); first < (part + 1) * kPart;
       first += kEntries) {
    ScoreSlots(a, h, first, score);
    for (size_t q = 0; q < a.queries(); ++q) {
      Floats* row = h.rows + (part * a.queries() + q) * a.row();
      Weigh(a, &scores[q * kEntries / kLanes], row);
      AddAllValues(score + q * kEntries, h.value + first * a.width, kEntries, a.width, row + 1);
    }
  }
}

// Adds the last slots, which do not fill a part, and the new entries. Those that a query sees follow the slots, or the
// oldest position that it sees, one a position.
inline void AddLast(const Attention& a, const Head& h) {
  thread_local std::vector<Floats> scores;
  thread_local std::vector<float> new_scores;
  thread_local std::vector<size_t> seen, begin;  // of token t: seen[begin[t]] to seen[begin[t + 1] - 1]
  scores.resize(a.queries() * kEntries / kLanes);
  new_scores.resize(a.queries() * a.entries);
  float* score = reinterpret_cast<float*>(scores.data());
  Score(a, h.query, h.new_key, a.entries, new_scores.data(), a.entries);
  seen.clear(), begin.assign(1, 0);
  size_t end = h.length;
  const auto start = [&](size_t t) { return std::max<size_t>(h.length, std::max(0, h.oldest[t])); };
  for (size_t t = 0; t < a.tokens; ++t) {
    for (size_t m = 0; m < a.entries; ++m) {
      if (h.mask[t * a.entries + m]) seen.push_back(m);
    }
    end = std::max(end, start(t) + seen.size() - begin.back());
    begin.push_back(seen.size());
  }
  for (size_t first = h.length / kPart * kPart; first < end; first += kEntries) {
    const size_t count = ScoreSlots(a, h, first, score);
    for (size_t q = 0; q < a.queries(); ++q) {
      const size_t t = q % a.tokens, before = start(t);
      float* own = score + q * kEntries;
      Floats* row = h.rows + (first / kPart * a.queries() + q) * a.row();
      const auto for_new = [&](const auto& function) {
        for (size_t i = begin[t]; i < begin[t + 1]; ++i) {
          const size_t position = before + i - begin[t];
          if (position >= first && position < first + kEntries) function(position - first, seen[i]);
        }
      };
      for_new([&](size_t lane, size_t m) { own[lane] = new_scores[q * a.entries + m]; });
      Weigh(a, &scores[q * kEntries / kLanes], row);
      AddAllValues(own, h.value + first * a.width, count, a.width, row + 1);
      for_new([&](size_t lane, size_t m) { AddAllValues(own + lane, h.new_value + m * a.width, 1, a.width, row + 1); });
    }
  }
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
  size_t longest = 0, furthest = 0;  // of all sequences: slots, and the position behind the new entries
  for (size_t b = 0; b < a.batch; ++b) {
    longest = std::max<size_t>(longest, length(b));
    const int32_t oldest = *std::max_element(a.oldest + b * a.tokens, a.oldest + (b + 1) * a.tokens);
    furthest = std::max<size_t>({furthest, longest + a.entries, std::max(0, oldest) + a.entries});
  }
  const size_t parts = furthest / kPart + 1, tasks = longest / kPart + 1;  // of a pair

  thread_local std::vector<Floats> query, rows;  // aligned as vectors are
  query.assign(pairs * queries * vectors, Floats{});
  for (size_t q = 0; q < pairs * queries; ++q) std::memcpy(&query[q * vectors], a.query + q * a.width, a.width * 4);
  rows.assign(pairs * parts * queries * a.row(), Floats{});
  for (size_t r = 0; r < rows.size(); r += a.row()) Best(&rows[r]) = -FLT_MAX;

  Floats *const first_row = rows.data(), *const first_query = query.data();  // this thread's, for all
  const size_t stride = queries * a.row();
  InParallel(pool, pairs * tasks, [&](size_t i) {
    const size_t pair = i / tasks, part = i % tasks, b = pair / a.kv_heads;
    const size_t slot = pair * a.slots * a.width, entry = pair * a.entries * a.width;
    const Head h{first_query + pair * queries * vectors,
                 a.key + slot,
                 a.value + slot,
                 a.new_key + entry,
                 a.new_value + entry,
                 a.mask + b * a.tokens * a.entries,
                 a.oldest + b * a.tokens,
                 static_cast<size_t>(length(b)),
                 first_row + pair * parts * stride};
    if (part < h.length / kPart) AddSlots(a, h, part);
    if (part == h.length / kPart) AddLast(a, h);
  });
  for (size_t q = 0; q < pairs * queries; ++q) {
    const size_t pair = q / queries, head = q % queries / a.tokens;
    Combine(a, first_row + pair * parts * stride + q % queries * a.row(), parts, stride,
            a.sink[pair % a.kv_heads * a.heads + head], a.out + q * a.width);
  }
}

}  // namespace

#endif  // EAGLE_CPU_ATTENTION_H_

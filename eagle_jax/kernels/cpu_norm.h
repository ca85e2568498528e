// Norms of columns for XLA:CPU, which adds up a column's squares in another order where there are eight columns or more.

#ifndef EAGLE_CPU_NORM_H_
#define EAGLE_CPU_NORM_H_

#include "cpu_matmul.h"

namespace {

// Rounded once where the machine can, however the loop around it is compiled.
inline float MultiplyAdd(float sum, float a, float b) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, sum);
#else
  return sum + a * b;
#endif
}

// x / rms(x) * scale of each column of [width, columns]. Squares are added in kLanes parts, and the parts in one order.
inline void Norm(const float* x, const float* scale, size_t width, size_t columns, float eps, float* y) {
  thread_local std::vector<float> parts, rms;
  parts.assign(kLanes * columns, 0), rms.assign(columns, 0);
  for (size_t d = 0; d < width; ++d) {
    const float* row = x + d * columns;
    float* part = &parts[d % kLanes * columns];
    for (size_t c = 0; c < columns; ++c) part[c] = MultiplyAdd(part[c], row[c], row[c]);
  }
  for (size_t i = 0; i < parts.size(); ++i) rms[i % columns] += parts[i];
  for (float& of_column : rms) of_column = std::sqrt(of_column / width + eps);
  if (columns == 1) {  // one loop, which the compiler makes vectors of
    for (size_t d = 0; d < width; ++d) y[d] = x[d] / rms[0] * scale[d];
    return;
  }
  for (size_t d = 0; d < width; ++d) {
    for (size_t c = 0; c < columns; ++c) y[d * columns + c] = x[d * columns + c] / rms[c] * scale[d];
  }
}

}  // namespace

#endif  // EAGLE_CPU_NORM_H_

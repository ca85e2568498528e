// What XLA:CPU calls: kernels that the system's C++ compiler makes for the CPU at hand.

#include "cpu_attention.h"
#include "cpu_matmul.h"
#include "cpu_norm.h"
#include "xla/ffi/api/ffi.h"

namespace {

using FloatBuffer = ffi::Buffer<ffi::F32>;
using IntBuffer = ffi::Buffer<ffi::S32>;

// Weights are float32, int8, or uint8: then each holds two of 4 bits. `scale` and `offset` hold what `Product` says.
ffi::Error HandleMatmul(ffi::ThreadPool pool, ffi::AnyBuffer weight, FloatBuffer scale, FloatBuffer offset, FloatBuffer x,
                        ffi::ResultBuffer<ffi::F32> y) {
  const auto type = weight.element_type();
  const auto shape = x.dimensions(), of_weight = weight.dimensions();
  const int64_t in = of_weight.size() < 2 ? 0 : of_weight.back() * (type == ffi::U8 ? 2 : 1);
  if (shape.size() != 2 || in < 1 || in != shape[0]) {
    return ffi::Error::InvalidArgument("expected weights [..., in] and columns [in, columns]");
  }
  const size_t width = in, rows = weight.element_count() / of_weight.back();
  const size_t scales = type == ffi::U8 ? rows * (width / kGroup) : type == ffi::S8 ? rows : 0;
  if (scale.element_count() != scales || offset.element_count() != (type == ffi::U8 ? scales : 0)) {
    return ffi::Error::InvalidArgument("scales or offsets do not fit the weights");
  }
  const auto multiply = type == ffi::F32                          ? MultiplyAll<float>
                        : type == ffi::S8                         ? MultiplyAll<int8_t>
                        : type == ffi::U8 && width % kGroup == 0 ? MultiplyAll<Nibbles>
                                                                  : nullptr;
  if (multiply == nullptr) return ffi::Error::InvalidArgument("weights are float32, int8, or uint8 in whole groups");
  multiply(pool, weight.untyped_data(), scales == 0 ? nullptr : scale.typed_data(), offset.typed_data(), rows, width,
           x.typed_data(), shape[1], y->typed_data());
  return ffi::Error::Success();
}

ffi::Error HandleAttention(ffi::ThreadPool pool, FloatBuffer query, FloatBuffer new_key, FloatBuffer new_value,
                           ffi::Buffer<ffi::PRED> mask, FloatBuffer key, FloatBuffer value, IntBuffer length,
                           IntBuffer oldest, FloatBuffer sink, ffi::ResultBuffer<ffi::F32> out) {
  const auto of_query = query.dimensions(), of_new = new_key.dimensions(), of_slots = key.dimensions();
  if (of_query.size() != 5 || of_new.size() != 4 || of_slots.size() != 4) {
    return ffi::Error::InvalidArgument("expected queries [B, G, J, T, K] and keys [B, G, M, K] and [B, G, S, K]");
  }
  Attention a{};
  a.batch = of_query[0], a.kv_heads = of_query[1], a.heads = of_query[2], a.tokens = of_query[3], a.width = of_query[4];
  a.entries = of_new[2], a.slots = of_slots[2];
  const size_t pairs = a.batch * a.kv_heads, of_keys = pairs * a.width;
  if (new_key.element_count() != of_keys * a.entries || new_value.element_count() != of_keys * a.entries ||
      key.element_count() != of_keys * a.slots || value.element_count() != of_keys * a.slots ||
      mask.element_count() != a.batch * a.tokens * a.entries || length.element_count() != a.batch ||
      oldest.element_count() != a.batch * a.tokens || sink.element_count() != a.kv_heads * a.heads) {
    return ffi::Error::InvalidArgument("the operands of attention do not fit together");
  }
  a.query = query.typed_data(), a.new_key = new_key.typed_data(), a.new_value = new_value.typed_data();
  a.mask = mask.typed_data(), a.key = key.typed_data(), a.value = value.typed_data(), a.length = length.typed_data();
  a.oldest = oldest.typed_data(), a.sink = sink.typed_data(), a.out = out->typed_data();
  Attend(pool, a);
  return ffi::Error::Success();
}

ffi::Error HandleNorm(FloatBuffer x, FloatBuffer scale, FloatBuffer eps, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  const size_t width = scale.element_count();
  if (shape.size() < 2 || shape[shape.size() - 2] != static_cast<int64_t>(width) || eps.element_count() != 1) {
    return ffi::Error::InvalidArgument("expected columns [..., width, columns], scales [width] and a number");
  }
  const size_t size = width * shape.back();
  for (size_t at = 0; at < x.element_count(); at += size) {
    Norm(x.typed_data() + at, scale.typed_data(), width, shape.back(), *eps.typed_data(), y->typed_data() + at);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle_norm, HandleNorm,
                              ffi::Ffi::Bind()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle_matmul, HandleMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle_attention, HandleAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>());

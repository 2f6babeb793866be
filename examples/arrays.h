// What the larger examples share besides the library: arrays whose bytes are counted, and calls
// with the workspace that they need.
#pragma once

#include <ehc/context.h>
#include <ehc/memory.h>
#include <ehc/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>

namespace example {

using ehc::DType;
using ehc::Tensor;

// Bytes of the arrays that live, and the most there were.
struct Meter {
  size_t now = 0;
  size_t peak = 0;
};

// Memory of its own, with a view of all of it. Without memory it is an absent tensor.
class Array {
 public:
  Array() = default;
  // Zeros of the type and shape of `like`.
  Array(const ehc::Context& context, Meter& meter, const Tensor& like) : view_(like) {
    const size_t bytes = static_cast<size_t>(like.numel()) * ehc::size_of(like.dtype);
    memory_ = std::make_unique<Memory>(context, meter, bytes);
    view_.data = memory_->buffer.data();
    if (bytes > 0) std::memset(view_.data, 0, bytes);
  }
  [[nodiscard]] bool present() const { return memory_ != nullptr; }
  operator Tensor() const { return present() ? view_ : Tensor(); }  // NOLINT: a tensor to callers

 private:
  struct Memory {
    Memory(const ehc::Context& context, Meter& m, size_t bytes) : buffer(context, bytes), meter(m) {
      meter.now += bytes;
      meter.peak = std::max(meter.peak, meter.now);
    }
    ~Memory() { meter.now -= buffer.bytes(); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ehc::Buffer buffer;
    Meter& meter;
  };
  std::unique_ptr<Memory> memory_;
  Tensor view_;
};

// A context with its meter, which must outlive the arrays.
struct Runtime {
  ehc::Context context = ehc::Context::cpu();
  Meter meter;

  Array zeros(DType type, std::initializer_list<int64_t> shape) {
    return {context, meter, Tensor(nullptr, type, shape)};
  }
  // Runs one operator. A program for long runs keeps one workspace, as large as the largest call.
  template <class P>
  void call(void (*op)(ehc::Context&, const P&), const P& params) {
    const auto bytes = static_cast<int64_t>(workspace_bytes(context, params));
    const Array workspace = zeros(DType::u8, {bytes});
    context.set_workspace(Tensor(workspace).data, static_cast<size_t>(bytes));
    op(context, params);
    context.set_workspace(nullptr, 0);
  }
};

// Elements of row-major tensors of F32 or BF16 in order.
inline float get(const Tensor& t, int64_t i) {
  if (t.dtype == DType::f32) return t.as<float>()[i];
  return std::bit_cast<float>(uint32_t{t.as<uint16_t>()[i]} << 16);
}
inline void set(const Tensor& t, int64_t i, float x) {
  if (t.dtype == DType::f32) {
    t.as<float>()[i] = x;
  } else {  // to nearest even; the numbers here are finite
    const auto bits = std::bit_cast<uint32_t>(x);
    t.as<uint16_t>()[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
inline void fill_normal(const Tensor& t, std::mt19937& generator, float mean, float spread) {
  std::normal_distribution<float> normal(mean, spread);
  for (int64_t i = 0; i < t.numel(); ++i) set(t, i, normal(generator));
}
inline void copy(const Tensor& from, const Tensor& to) {
  std::memcpy(to.data, from.data, static_cast<size_t>(from.numel()) * ehc::size_of(from.dtype));
}
inline bool has_same_bits(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data, b.data, static_cast<size_t>(a.numel()) * ehc::size_of(a.dtype)) == 0;
}

}  // namespace example

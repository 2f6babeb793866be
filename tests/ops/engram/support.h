// What the tests of the operators share: arrays with any layout, random values, and the
// implementations that this processor runs.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "backends/cpu/blas.h"
#include "backends/cpu/isa.h"
#include "cli/compare.h"
#include "core/float_formats.h"
#include "core/registry.h"
#include "ehc/error.h"
#include "ehc/memory.h"
#include "ehc/tensor.h"

namespace ehc::test {

// Distance of rows beyond what they need, and of the first element from a 64-byte border.
struct Layout {
  int64_t row_padding = 0;
  int64_t offset = 0;
};

// An array of its own with row-major axes, rows possibly apart, filled with zeros.
class Array {
 public:
  Array() = default;
  Array(Array&&) = default;
  Array& operator=(Array&&) = default;
  Array(DType type, std::vector<int64_t> shape, Layout layout = {}) : offset_(layout.offset) {
    tensor_ = Tensor(nullptr, type, shape.data(), static_cast<int>(shape.size()));
    int64_t step = 1;
    for (int k = tensor_.rank - 1; k >= 0; --k) {
      tensor_.stride[k] = step;
      step = step * std::max<int64_t>(1, tensor_.shape[k]) + layout.row_padding;
    }
    memory_.assign((static_cast<size_t>(step + offset_) * size_of(type)) + 64, 0);
  }

  [[nodiscard]] Tensor view() const {
    Tensor t = tensor_;
    auto at = reinterpret_cast<uintptr_t>(memory_.data());
    at = (at + 63) / 64 * 64 + static_cast<uintptr_t>(offset_) * size_of(t.dtype);
    t.data = reinterpret_cast<void*>(at);
    return t;
  }
  operator Tensor() const { return view(); }  // NOLINT: an Array is used as a tensor

  [[nodiscard]] int64_t size() const { return tensor_.numel(); }
  // Position of element `i` in row-major order.
  [[nodiscard]] int64_t at(int64_t i) const {
    int64_t position = 0;
    for (int k = tensor_.rank - 1; k >= 0; --k) {
      position += i % tensor_.shape[k] * tensor_.stride[k];
      i /= tensor_.shape[k];
    }
    return position;
  }
  [[nodiscard]] float get(int64_t i) const { return load_float(view().data, tensor_.dtype, at(i)); }
  void set(int64_t i, float x) { store_float(view().data, tensor_.dtype, at(i), x); }
  template <class T>
  [[nodiscard]] T& element(int64_t i) const {
    return view().as<T>()[at(i)];
  }

  void fill(float x) {
    for (int64_t i = 0; i < size(); ++i) set(i, x);
  }
  // Values of about size `spread` around `mean`.
  static Array random(DType type, std::vector<int64_t> shape, uint32_t seed, float mean = 0,
                      float spread = 1) {
    Array array(type, std::move(shape));
    std::mt19937 generator(seed);
    for (int64_t i = 0; i < array.size(); ++i) {
      float x = -2;
      for (int k = 0; k < 4; ++k) x += static_cast<float>(generator() >> 8) * 0x1p-24F;
      array.set(i, mean + x * 1.7F * spread);
    }
    return array;
  }
  // The same values in another layout or type.
  [[nodiscard]] Array copy(Layout layout = {}) const { return copy(tensor_.dtype, layout); }
  [[nodiscard]] Array copy(DType type, Layout layout = {}) const {
    Array other(type, std::vector<int64_t>(tensor_.shape, tensor_.shape + tensor_.rank), layout);
    for (int64_t i = 0; i < size(); ++i) {
      if (type == tensor_.dtype) {
        std::memcpy(other.raw(i), raw(i), size_of(type));
      } else {
        other.set(i, get(i));
      }
    }
    return other;
  }
  // Elements in row-major order as bytes, of the whole array or of rows [begin, end) of its first
  // axis.
  [[nodiscard]] std::string bits() const { return bits(0, tensor_.shape[0]); }
  [[nodiscard]] std::string bits(int64_t begin, int64_t end) const {
    const int64_t row = size() == 0 ? 0 : size() / tensor_.shape[0];
    std::string out;
    for (int64_t i = begin * row; i < end * row; ++i) out.append(raw(i), size_of(tensor_.dtype));
    return out;
  }
  // Rows [begin, end) of the first axis.
  [[nodiscard]] Tensor rows(int64_t begin, int64_t end) const {
    return view().slice(0, begin, end);
  }

 private:
  [[nodiscard]] char* raw(int64_t i) const {
    return static_cast<char*>(view().data) + at(i) * static_cast<int64_t>(size_of(tensor_.dtype));
  }
  int64_t offset_ = 0;
  Tensor tensor_;
  std::vector<unsigned char> memory_;
};

// Names of the CPU implementations of an operator that run here.
inline std::vector<std::string> implementations(const char* op_name) {
  std::vector<std::string> names;
  for (const Implementation& impl : find_operator(op_name)->implementations) {
    bool runs = impl.device == Device::cpu;
    for (const Isa isa : kEachIsa) {
      if (impl.name == "cpu." + std::string(isa_name(isa))) runs = cpu_supports(isa);
    }
    if (impl.name == "cpu.openblas") runs = blas::openblas_fault().empty();
    if (runs) names.emplace_back(impl.name);
  }
  return names;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// Runs `body(implementation, shape)` over everything, with a trace for failures.
template <class Shape, class Body>
void for_each_case(const char* op_name, const std::vector<Shape>& shapes, const Body& body) {
  for (const std::string& impl : implementations(op_name)) {
    for (const Shape& s : shapes) {
      std::ostringstream text;
      text << impl << " " << s;
      SCOPED_TRACE(text.str());
      body(impl, s);
    }
  }
}

// For each size of chunks calls `body(feed)`; feed(run_tokens) calls run_tokens(begin, end) for the
// chunks of T tokens in order.
template <class Body>
void for_each_chunk_size(int64_t tokens, const Body& body) {
  for (const int64_t chunk : {int64_t{1}, int64_t{5}, int64_t{32}}) {
    if (chunk == 1 && tokens > 33) continue;  // takes long, and says no more
    SCOPED_TRACE("chunks of " + std::to_string(chunk));
    body([&](const auto& run_tokens) {
      for (int64_t t = 0; t < tokens; t += chunk) run_tokens(t, std::min(tokens, t + chunk));
    });
  }
}

// I32[B+1]; without borders I32[0].
inline Array borders_of(const std::vector<int32_t>& cu_seqlens) {
  Array borders(DType::i32, {static_cast<int64_t>(cu_seqlens.size())});
  for (size_t i = 0; i < cu_seqlens.size(); ++i) {
    borders.element<int32_t>(static_cast<int64_t>(i)) = cu_seqlens[i];
  }
  return borders;
}

// Three sequences, of which the second is empty.
inline std::vector<int32_t> thirds(int64_t tokens) {
  const auto third = static_cast<int32_t>(tokens / 3);
  return {0, third, third, static_cast<int32_t>(tokens)};
}

// Random keys that resemble their stream keep the logit away from 0, where the gate is steep.
inline Array keys_like(const Array& residual, std::vector<int64_t> shape, uint32_t seed) {
  Array key = Array::random(residual.view().dtype, std::move(shape), seed);
  for (int64_t i = 0; i < key.size(); ++i) key.set(i, key.get(i) + residual.get(i));
  return key;
}

// kv[T, n+1, d] of key[T, n, d] and value[T, d].
inline Array pack_kv(const Array& key, const Array& value, Layout layout = {}) {
  const Tensor k = key.view();
  const int64_t keys = k.shape[1] * k.shape[2];
  const int64_t width = k.shape[2];
  Array kv(k.dtype, {k.shape[0], k.shape[1] + 1, width}, layout);
  for (int64_t t = 0; t < k.shape[0]; ++t) {
    for (int64_t i = 0; i < keys + width; ++i) {
      kv.set(t * (keys + width) + i,
             i < keys ? key.get(t * keys + i) : value.get(t * width + i - keys));
    }
  }
  return kv;
}

// Lends a context the workspace of a call; keep the buffer until after it.
template <class P>
Buffer workspace_for(Context& context, const P& p) {
  Buffer workspace(context, workspace_bytes(context, p));
  context.set_workspace(workspace.data(), workspace.bytes());
  return workspace;
}

inline Context context_for(const std::string& implementation, int threads = 1) {
  Context context = Context::cpu(threads);
  context.set_implementation(implementation);
  return context;
}

// Text of the contract error that `call` throws, or "none".
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.kind() == ErrorKind::contract ? e.what() : "another kind of error";
  }
  return "none";
}

// `got` against `expected` of the same type by the default rule of `ehc op --check`, which is meant
// for short sums; the float reference adds serially, OpenBLAS in an order of its own choice: they
// get more room.
inline void expect_close(const std::string& implementation, const Tensor& got,
                         const Tensor& expected, const std::string& what) {
  cli::Tolerance rule = cli::default_tolerance(expected);
  if (implementation == "reference.f32" || implementation == "cpu.openblas") {
    rule.ulp *= 8;
    rule.abs *= 8;
  }
  const auto result = cli::compare(got, expected, rule, /*sum_first_axis=*/false);
  EXPECT_TRUE(result.equal) << what << ": max error " << result.max_error << ", " << result.max_ulp
                            << " ulp, failing " << result.failing << " " << result.note;
}

// Sums of terms that cancel have no fixed bound for each element (`ehc check` has one that follows
// the terms), so: the distance of the whole.
inline void expect_similar(const Array& got, const Array& want, const char* what) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < want.size(); ++i) {
    const double x = got.get(i), y = want.get(i);
    difference += (x - y) * (x - y);
    size += x * x + y * y;
  }
  const DType type = want.view().dtype;
  const double bound = type == DType::f32 ? 1e-10 : type == DType::f16 ? 1e-8 : 1e-6;
  EXPECT_LE(difference, bound * size) << what;
}

// Every implementation's gradient of loss() by `input`, which run(implementation) leaves in
// `gradient`, against central differences. What is NaN stays so.
template <class Run, class Loss>
void expect_slopes(const char* op_name, Array& input, const Array& gradient, const Run& run,
                   const Loss& loss, const char* what) {
  constexpr float kStep = 0x1p-8F;
  const std::vector<std::string> names = implementations(op_name);
  std::vector<Array> found;
  for (const std::string& impl : names) {
    run(impl);
    found.push_back(gradient.copy());
  }
  for (int64_t i = 0; i < input.size(); ++i) {
    const float x = input.get(i);
    if (std::isnan(x)) continue;
    input.set(i, x + kStep);
    const double above = loss();
    input.set(i, x - kStep);
    const double below = loss();
    input.set(i, x);
    for (size_t k = 0; k < names.size(); ++k) {
      EXPECT_NEAR(found[k].get(i), (above - below) / (2 * kStep), 4e-3)
          << names[k] << " " << what << " " << i;
    }
  }
}

}  // namespace ehc::test

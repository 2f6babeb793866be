// What the tests of the mHC operators share.
#pragma once

#include "tests/ops/engram/support.h"

namespace ehc::test {

struct StreamShape {
  int64_t T, n, d;
  DType type;
};

inline std::ostream& operator<<(std::ostream& out, const StreamShape& s) {
  return out << "T=" << s.T << " n=" << s.n << " d=" << s.d << " " << name_of(s.type);
}

// Every edge of T, n and d in some combination, every type.
inline std::vector<StreamShape> stream_shapes() {
  std::vector<StreamShape> list;
  const int64_t tokens[] = {1, 2, 31, 33};
  int at = 0;
  for (const int64_t d : {1, 7, 32, 64, 96, 257, 576, 1000, 1030}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t n : {int64_t{4}, int64_t{1 + at * 5 % 8}}) {
        list.push_back({d > 500 ? 2 : tokens[at % 4], n, d, type});
      }
      ++at;
    }
  }
  return list;
}

// Those that take activations of a type: tiles of AMX multiply BF16 alone.
inline std::vector<std::string> implementations(const char* op_name, DType activation) {
  std::vector<std::string> names = implementations(op_name);
  if (activation != DType::bf16) std::erase(names, "cpu.amx");
  return names;
}

// Implementations that keep the order of operations of the contract: all but the one in double.
inline std::vector<std::string> exact_implementations(const char* op_name) {
  std::vector<std::string> names = implementations(op_name);
  std::erase(names, "reference");
  return names;
}

// Layouts that no bit may depend on.
inline constexpr Layout kLayouts[] = {{0, 0}, {7, 1}, {32, 0}, {0, 3}};

// The slope of `loss` along each element of `input`, by a central difference that is exact but for
// rounding: all these operators are linear in each of their inputs.
template <class Loss>
std::vector<double> slopes(Array& input, const Loss& loss) {
  std::vector<double> found;
  for (int64_t i = 0; i < input.size(); ++i) {
    const float x = input.get(i);
    input.set(i, x + 1);
    const double above = loss();
    input.set(i, x - 1);
    const double below = loss();
    input.set(i, x);
    found.push_back((above - below) / 2);
  }
  return found;
}

inline void expect_slopes(const Array& gradient, const std::vector<double>& expected,
                          const std::string& what) {
  ASSERT_EQ(gradient.size(), static_cast<int64_t>(expected.size())) << what;
  for (int64_t i = 0; i < gradient.size(); ++i) {
    EXPECT_NEAR(gradient.get(i), expected[static_cast<size_t>(i)], 2e-5) << what << " " << i;
  }
}

// sum(weight * values), in double.
inline double inner_product(const Array& weight, const Array& values) {
  double sum = 0;
  for (int64_t i = 0; i < values.size(); ++i) {
    sum += static_cast<double>(weight.get(i)) * values.get(i);
  }
  return sum;
}

}  // namespace ehc::test

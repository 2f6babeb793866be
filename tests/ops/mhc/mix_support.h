// What the tests of the mixes share.
#pragma once

#include <functional>

#include "tests/ops/mhc/support.h"

namespace ehc::test {

using Doubles = std::vector<double>;

// Values of about size `spread` around `mean`.
inline Doubles random_doubles(int64_t count, uint32_t seed, double mean = 0, double spread = 1) {
  const Array values = Array::random(DType::f32, {count}, seed);
  Doubles out;
  for (int64_t i = 0; i < count; ++i) out.push_back(mean + spread * values.get(i));
  return out;
}

inline double inner_product(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The slopes of loss(x) by central differences in double.
inline Doubles slopes_of(Doubles x, const std::function<double(const Doubles&)>& loss) {
  constexpr double kStep = 1e-5;
  Doubles found;
  for (double& value : x) {
    const double at = value;
    value = at + kStep;
    const double above = loss(x);
    value = at - kStep;
    const double below = loss(x);
    value = at;
    found.push_back((above - below) / (2 * kStep));
  }
  return found;
}

// Every element within `share` of the largest.
inline void expect_near(const Doubles& got, const Doubles& expected, double share,
                        const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double largest = 1e-300;
  for (const double x : expected) largest = std::max(largest, std::fabs(x));
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], share * largest) << what << " " << i;
  }
}

inline Array array_of(const Doubles& values, std::vector<int64_t> shape) {
  Array array(DType::f32, std::move(shape));
  for (int64_t i = 0; i < array.size(); ++i) {
    array.set(i, static_cast<float>(values[static_cast<size_t>(i)]));
  }
  return array;
}
inline Doubles doubles_of(const Array& array) {
  Doubles values;
  for (int64_t i = 0; i < array.size(); ++i) values.push_back(array.get(i));
  return values;
}

// Runs op(context, params) with the workspace that it needs.
template <class Op, class P>
void run_on(const std::string& implementation, const Op& op, const P& params, int threads = 1) {
  Context context = context_for(implementation, threads);
  const Buffer workspace = workspace_for(context, params);
  op(context, params);
}

}  // namespace ehc::test

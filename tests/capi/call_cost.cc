// Prints the cost of one call at T = 1, through C++ and through the C interface.
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "ehc/c_api.h"
#include "ehc/engram/hash.h"

namespace {

template <class Call>
void measure(const char* name, const Call& call) {
  // The best of many short batches: the cost while nothing else runs on the core.
  constexpr int kCalls = 500;
  double best = 1e9;
  for (int batch = 0; batch < 1000; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    best = took.count() / kCalls < best ? took.count() / kCalls : best;
  }
  std::printf("%-28s %6.0f ns\n", name, best);
}

ehc_tensor tensor(void* data, ehc_dtype dtype, int rank, const int64_t* shape) {
  return {data, {EHC_HOST, 0}, rank, dtype, shape, nullptr, 0};
}

}  // namespace

int main() {
  int32_t window[2] = {1, 2};
  int64_t multipliers[2] = {3, 5};
  int32_t sizes[1] = {7};
  int32_t offsets[1] = {0};
  int32_t indices[1];
  ehc::Context cpu = ehc::Context::cpu(1);
  measure("C++", [&] {
    ehc::engram::hash(cpu, {.window = {window, ehc::DType::i32, {1, 2}},
                            .multipliers = {multipliers, ehc::DType::i64, {1, 2}},
                            .vocab_sizes = {sizes, ehc::DType::i32, {1, 1, 1}},
                            .offsets = {offsets, ehc::DType::i32, {1, 1}},
                            .indices = {indices, ehc::DType::i32, {1, 1, 1}}});
  });

  const int64_t pair[] = {1, 2};
  const int64_t one[] = {1, 1, 1};
  const ehc_tensor t[5] = {tensor(window, {0, 32, 1}, 2, pair),
                           tensor(multipliers, {0, 64, 1}, 2, pair),
                           tensor(sizes, {0, 32, 1}, 3, one), tensor(offsets, {0, 32, 1}, 2, one),
                           tensor(indices, {0, 32, 1}, 3, one)};
  const ehc_operator* op = ehc_op_find("engram.hash");
  ehc_context* context = nullptr;
  if (op == nullptr || ehc_context_create_cpu(1, &context) != EHC_OK) return 1;

  const ehc_tensor* positional[6] = {&t[0], &t[1], &t[2], &t[3], nullptr, &t[4]};
  ehc_attribute layout{};
  layout.position = ehc_op_attribute_position(op, "layout");
  layout.type = EHC_CHOICE;
  const ehc_arguments by_position{positional, 6, nullptr, 0, &layout, 1};
  int status = EHC_OK;
  measure("C, tensors by position", [&] { status |= ehc_run(context, op, &by_position); });

  const ehc_named_tensor named[5] = {{"window", 0, &t[0]},
                                     {"multipliers", 0, &t[1]},
                                     {"vocab_sizes", 0, &t[2]},
                                     {"offsets", 0, &t[3]},
                                     {"indices", 1, &t[4]}};
  layout.name = "layout";
  layout.type = EHC_TEXT;
  layout.text = "LTC";
  const ehc_arguments by_name{nullptr, 0, named, 5, &layout, 1};
  measure("C, tensors by name", [&] { status |= ehc_run(context, op, &by_name); });

  ehc_layout layouts[6];
  measure("C, ehc_infer_outputs",
          [&] { status |= ehc_infer_outputs(op, &by_position, layouts, 6); });
  ehc_context_destroy(context);
  return status;
}

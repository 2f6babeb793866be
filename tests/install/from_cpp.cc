#include <ehc/ehc.h>

#include <cstdint>
#include <cstdio>

#if EHC_VERSION < 100
#error "the version header is wrong"
#endif

int main() {
  const int32_t window[2] = {5, 3};
  const int64_t multipliers[2] = {3, 5};
  const int32_t sizes[2] = {7, 11};
  const int32_t offsets[2] = {0, 7};
  int32_t indices[2] = {};
  try {
    ehc::Context context = ehc::Context::cpu(1);
    ehc::engram::hash(context, {.window = {window, ehc::DType::i32, {1, 2}},
                                .multipliers = {multipliers, ehc::DType::i64, {1, 2}},
                                .vocab_sizes = {sizes, ehc::DType::i32, {1, 1, 2}},
                                .offsets = {offsets, ehc::DType::i32, {1, 2}},
                                .indices = {indices, ehc::DType::i32, {1, 1, 2}}});
    std::printf("ehc %s: rows %d %d\n", EHC_VERSION_STRING, indices[0], indices[1]);
    ehc::Context::cpu(-1);
  } catch (const ehc::Error& e) {  // the library's type information is ours too
    std::printf("%s\n", e.what());
    return indices[0] == 0 && indices[1] == 7 ? 0 : 1;
  }
  return 1;
}

#include "backends/cpu/blas.h"

#if EHC_HAS_OPENBLAS
#include <mutex>
#include <vector>

#include "backends/cpu/isa.h"

// Declared here because its header lies elsewhere on every system; enumerations have the size of
// int.
extern "C" {
void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                 const float* a, int a_stride, const float* b, int b_stride, float beta, float* c,
                 int c_stride);
char* openblas_get_corename(void);
int openblas_get_parallel(void);
}
#endif

namespace ehc::blas {

#if EHC_HAS_OPENBLAS

namespace {

// Integers between -8 and 7, so that every sum is exact.
std::vector<float> small_integers(int64_t count, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<float>(seed >> 28) - 8;
  }
  return values;
}

bool is_right(int64_t rows, int64_t columns, int64_t depth, bool a_by_depth, bool b_by_depth) {
  const std::vector<float> a = small_integers(rows * depth, 1);
  const std::vector<float> b = small_integers(columns * depth, 2);
  std::vector<float> c(static_cast<size_t>(rows * columns), -0.5F);
  const int64_t a_stride = a_by_depth ? rows : depth;
  const int64_t b_stride = b_by_depth ? columns : depth;
  multiply_openblas({a.data(), b.data(), c.data(), a_stride, b_stride, columns, rows, columns,
                     depth, false, a_by_depth, b_by_depth});
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const int64_t at_a = a_by_depth ? k * rows + i : i * depth + k;
        const int64_t at_b = b_by_depth ? k * columns + j : j * depth + k;
        sum += a[static_cast<size_t>(at_a)] * b[static_cast<size_t>(at_b)];
      }
      if (c[static_cast<size_t>(i * columns + j)] != sum) return false;
    }
  }
  return true;
}

// Bits of the vectors that OpenBLAS's kernels for this core use; 128 for the many old ones.
int vector_bits(std::string_view core) {
  for (const std::string_view wide : {"SkylakeX", "Cooperlake", "Sapphirerapids"}) {
    if (core == wide) return 512;
  }
  return core == "Haswell" || core == "Zen" ? 256 : 128;
}

std::string find_fault() {
  for (const int64_t rows : {1, 13, 48}) {
    for (const int64_t columns : {3, 64, 77}) {
      for (const int64_t depth : {5, 700}) {
        // The operands of forward and backward.
        if (is_right(rows, columns, depth, false, false) &&
            is_right(rows, columns, depth, false, true) &&
            is_right(rows, columns, depth, true, true)) {
          continue;
        }
        return "OpenBLAS computes wrong products on this processor with its " +
               std::string(openblas_get_corename()) + " kernels";
      }
    }
  }
  return {};
}

// Builds without threads are, unlike the others, not safe to call from several threads at once:
// the calls share buffers, and give wrong products.
bool is_serial() {
  static const bool serial = openblas_get_parallel() == 0;
  return serial;
}

std::string find_weakness() {
  if (is_serial()) return "this build of OpenBLAS serves one thread at a time";
  const std::string core = openblas_get_corename();
  const int ours = cpu_supports(Isa::avx512) ? 512 : cpu_supports(Isa::avx2) ? 256 : 128;
  if (vector_bits(core) >= ours) return {};
  return "OpenBLAS runs its " + core + " kernels on a processor with " + std::to_string(ours) +
         "-bit vectors (see OPENBLAS_CORETYPE)";
}

}  // namespace

const std::string& openblas_fault() {
  static const std::string fault = find_fault();
  return fault;
}

const std::string& openblas_weakness() {
  static const std::string weakness = find_weakness();
  return weakness;
}

void multiply_openblas(const Product& p) {
  constexpr int kRowMajor = 101;
  constexpr int kAsIs = 111;
  constexpr int kTransposed = 112;
  static std::mutex one_at_a_time;
  std::unique_lock<std::mutex> lock;
  if (is_serial()) lock = std::unique_lock(one_at_a_time);
  const auto narrow = [](int64_t x) { return static_cast<int>(x); };
  cblas_sgemm(kRowMajor, p.a_by_depth ? kTransposed : kAsIs, p.b_by_depth ? kAsIs : kTransposed,
              narrow(p.rows), narrow(p.columns), narrow(p.depth), 1.0F, p.a, narrow(p.a_stride),
              p.b, narrow(p.b_stride), p.accumulate ? 1.0F : 0.0F, p.c, narrow(p.c_stride));
}

#else

const std::string& openblas_fault() {
  static const std::string fault = "the library was built without OpenBLAS";
  return fault;
}

const std::string& openblas_weakness() { return openblas_fault(); }

void multiply_openblas(const Product&) {}

#endif

std::string_view refuse_openblas(const Context& context) {
  if (!openblas_fault().empty()) return openblas_fault();
  const bool asked_for = context.implementation() == "cpu.openblas";
  return asked_for ? std::string_view() : openblas_weakness();
}

}  // namespace ehc::blas

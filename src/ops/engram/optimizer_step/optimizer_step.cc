#include "ehc/engram/optimizer_step.h"

#include <cmath>
#include <cstring>
#include <string>

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/engram/optimizer_step/optimizer_step_math.h"
#include "ops/engram/shared/optimizer_call.h"
#include "ops/engram/shared/sinkhorn_device.h"
#include "ops/engram/sinkhorn/sinkhorn_math.h"

namespace ehc::engram {

// `row_scale`, `norms` [rows], `col_scale` [hd]: scratch.
template <class Real>
void optimizer_step_reference(const OptimizerStepArgs& args, int64_t repeat, Real* row_scale,
                              Real* col_scale, Real* norms);

// A whole table, unless both are the same memory.
void optimizer_copy_cuda(const WeightRows& from, const WeightRows& to, int64_t rows, int64_t width,
                         int device, void* stream);
// Steps 1 and 2 of at least one row. `sums` [chunks]: scratch. `*finite`, on the device: are all
// norms finite, so that rows of scale 0 keep their weights and need not be read?
void optimizer_momentum_cuda(const OptimizerStepArgs& args, double* sums, int* finite, int device,
                             void* stream);
// Steps 4 and 5 of at least one row.
void optimizer_weights_cuda(const OptimizerStepArgs& args, const int* finite, int device,
                            void* stream);

namespace {

// --- tables: three forms with the same constants and outputs ---

template <class P>
constexpr auto constants() {
  return std::tuple(attribute<&P::lr>("lr").at_least(0), attribute<&P::eps>("eps").positive(),
                    attribute<&P::beta>("beta").between(0, 1), attribute<&P::nesterov>("nesterov"),
                    attribute<&P::repeat>("repeat").between(1, 64).fixes("repeat"),
                    attribute<&P::tau>("tau").at_least(0), attribute<&P::gamma>("gamma").positive(),
                    attribute<&P::alpha>("alpha").positive().computed_default("sqrt(hd)"));
}

template <class P>
constexpr auto new_state() {
  return std::tuple(
      out<&P::new_weight>("weight", "W[rows,hd]").typed_like("weight").may_alias("weight"),
      out<&P::new_momentum>("momentum", "W[rows,hd]").typed_like("momentum").may_alias("momentum"));
}

constexpr auto kDenseTable =
    table("engram.optimizer_step", "1.12", "one step of a table's optimizer",
          in<&OptimizerStep::weight>("weight", "W[rows,hd]"),
          in<&OptimizerStep::grad>("grad", "W[rows,hd]"),
          in<&OptimizerStep::momentum>("momentum", "W[rows,hd]"), constants<OptimizerStep>(),
          new_state<OptimizerStep>(),
          // The update: written once, read by each round and by the last pass.
          workspace_traffic("4*rows*hd*(repeat+2)"), SumsOverRows{},
          // Momentum, norms of its rows, 7 a round, 5 of the last pass, 2 of the weight.
          flops("rows*hd*(7*repeat+12)"), flops("3*rows*hd", "nesterov"));

// The other two are functions of C++ alone: the contract of calls by name has no such operators.
template <class P>
constexpr auto listed_rows(std::string_view name, std::string_view summary) {
  return table(name, "1.12", summary, in<&P::weight>("weight", "W[rows,hd]"),
               in<&P::unique_rows>("unique_rows", "I32/I64[U]"),
               in<&P::grad_rows>("grad_rows", "W[U,hd]"),
               in<&P::momentum>("momentum", "W[rows,hd]"), constants<P>(), new_state<P>());
}

constexpr auto kSparseTable = listed_rows<OptimizerStepSparse>(
    "engram.optimizer_step_sparse", "the same step with the gradient of some rows");
constexpr auto kLazyTable = listed_rows<OptimizerStepLazy>(
    "engram.optimizer_step_lazy", "a step of some rows, as if they were the table");

template <class P>
void check_rows(const Schema& schema, const Bound& bound, const void* params) {
  const Tensor& rows = static_cast<const P*>(params)->unique_rows;
  if (rows.device != Device::cpu) return;
  const RowList list = {rows.data, rows.dtype == DType::i64, bound["U"]};
  int64_t last = -1;
  for (int64_t u = 0; u < list.count; ++u) {
    const int64_t row = row_at(list, u);
    if (row <= last || row >= bound["rows"]) {
      fail_tensor(schema, "unique_rows",
                  "strictly ascending rows below " + std::to_string(bound["rows"]),
                  std::to_string(row) + " at position " + std::to_string(u));
    }
    last = row;
  }
}

// --- arguments ---

WeightRows weight_rows(const Tensor& t) { return {t.data, t.dtype, t.stride[0]}; }

template <class P>
OptimizerStepArgs make_args(const P& p, const Bound& b) {
  OptimizerStepArgs a;
  a.rows = b["rows"];
  if constexpr (std::is_same_v<P, OptimizerStep>) {
    a.grad = weight_rows(p.grad);
  } else {
    a.grad = weight_rows(p.grad_rows);
    a.touched = {p.unique_rows.data, p.unique_rows.dtype == DType::i64, b["U"]};
    a.form = OptimizerStepArgs::Form::sparse;
    if constexpr (std::is_same_v<P, OptimizerStepLazy>) {
      a.form = OptimizerStepArgs::Form::lazy;
      a.rows = b["U"];
    }
  }
  a.weight = weight_rows(p.weight);
  a.momentum = weight_rows(p.momentum);
  a.new_weight = weight_rows(p.new_weight);
  a.new_momentum = weight_rows(p.new_momentum);
  a.factors = momentum_factors(p.beta, p.nesterov);
  a.tau = static_cast<float>(p.tau);
  a.rate = static_cast<float>(*p.lr * p.gamma);
  a.matrix.x.width = b["hd"];
  a.matrix.x.eps = static_cast<float>(*p.eps);
  a.matrix.alpha = static_cast<float>(p.alpha ? *p.alpha : std::sqrt(static_cast<double>(b["hd"])));
  const size_t element = size_of(a.grad.type) + 2 * size_of(a.weight.type) +
                         2 * size_of(a.momentum.type) + sizeof(float);
  a.streaming = static_cast<size_t>(a.rows * a.matrix.x.width) * element > last_level_cache_bytes();
  return a;
}

void take_update(Workspace& workspace, OptimizerStepArgs& a) {
  const int64_t width = a.matrix.x.width;
  // Rows that are not short start on cache lines.
  a.matrix.x.update_stride = width < 64 ? width : (width + 15) / 16 * 16;
  a.update = workspace.take<float>(a.rows * a.matrix.x.update_stride);
  a.matrix.x.update = a.update;
}

void take_update_and_scales(Workspace& workspace, OptimizerStepArgs& a) {
  take_update(workspace, a);
  a.row_scale = workspace.take<float>(a.rows);
  a.col_scale = workspace.take<float>(a.matrix.x.width);
  a.matrix.x.row_scale = a.row_scale;
  a.matrix.x.col_scale = a.col_scale;
}

// What the SIMD kernels need beside the update.
struct Scratch {
  float* col_partial;  // [P,hd]
  double* norms;       // [P]
  float* zeros;        // [hd]
};

Scratch take_scratch(Workspace& workspace, OptimizerStepArgs& a) {
  const int64_t width = a.matrix.x.width;
  const int64_t chunks = sinkhorn_chunks(a.rows);
  take_update_and_scales(workspace, a);
  Scratch s;
  s.col_partial = workspace.take<float>(chunks * width);
  s.norms = workspace.take<double>(chunks);
  s.zeros = workspace.take<float>(width);
  a.zeros = s.zeros;
  return s;
}

template <class P>
size_t cpu_workspace(const Call& call) {
  OptimizerStepArgs a = make_args(*static_cast<const P*>(call.params), call.bound);
  Workspace workspace(nullptr);
  take_scratch(workspace, a);
  return workspace.bytes();
}

// --- runs ---

// The rows that a lazy step leaves alone: afterwards it runs in place.
void copy_table(const Call& call, const WeightRows& from, const WeightRows& to) {
  if (from.data == to.data) return;
  const int64_t width = call.bound["hd"];
  const auto size = static_cast<int64_t>(size_of(from.type));
  parallel_for(call.context, call.bound["rows"], rows_of_grain(width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   std::memcpy(static_cast<char*>(to.data) + r * to.stride * size,
                               static_cast<const char*>(from.data) + r * from.stride * size,
                               static_cast<size_t>(width * size));
                 }
               });
}

void start_lazy(const Call& call, OptimizerStepArgs& a) {
  if (a.form != OptimizerStepArgs::Form::lazy) return;
  copy_table(call, a.weight, a.new_weight);
  copy_table(call, a.momentum, a.new_momentum);
  a.weight = a.new_weight;
  a.momentum = a.new_momentum;
}

// From norms to the row scales before the first round.
void set_live_rows(const OptimizerStepArgs& a, double threshold, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    a.row_scale[r] = lives(a.row_scale[r], threshold) ? 1.0F : 0.0F;
  }
}

// From norms to the row scales after the first round, whose sums by column are those of all rows.
// False, and nothing done, when one of these rows should not be in the sums.
bool finish_first_round(const OptimizerStepArgs& a, double threshold, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    if (a.row_scale[r] != 0 && !lives(a.row_scale[r], threshold)) return false;
  }
  for (int64_t r = begin; r < end; ++r) {
    if (a.row_scale[r] == 0) continue;
    a.row_scale[r] = next_row_scale(1.0F, a.row_scale[r], a.matrix.x.eps);
  }
  return true;
}

template <class P, auto Momentum, auto Step, auto Reduce, auto Weights>
void run_cpu(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  OptimizerStepArgs a = make_args(p, call.bound);
  Workspace workspace(call.context.workspace());
  const Scratch scratch = take_scratch(workspace, a);
  const int64_t width = a.matrix.x.width;
  std::memset(scratch.zeros, 0, static_cast<size_t>(width) * sizeof(float));
  start_lazy(call, a);
  const auto for_chunks = [&](const auto& body) {
    parallel_chunks(call.context, a.rows, sinkhorn_chunk_rows(a.rows), body);
  };

  std::fill_n(a.col_scale, width, 1.0F);
  const bool is_summed = width <= kMostSummedWidth;
  for_chunks([&](int64_t chunk, int64_t begin, int64_t end) {
    float* sums = is_summed ? scratch.col_partial + chunk * width : nullptr;
    scratch.norms[chunk] = Momentum(a, begin, end, sums);
  });
  double total = 0;
  const int64_t chunks = sinkhorn_chunks(a.rows);
  for (int64_t c = 0; c < chunks; ++c) total += scratch.norms[c];
  const double threshold = live_threshold(a, total);
  a.skip_zero_scales = std::isfinite(total);

  SinkhornStepArgs step;
  step.x = a.matrix.x;
  step.skip_zero_scales = a.skip_zero_scales;
  step.new_row_scale = a.row_scale;
  step.col_partial = scratch.col_partial;
  step.col_partial_stride = width;
  SinkhornReduceArgs reduce;
  reduce.partials = chunks;
  reduce.col_partial = scratch.col_partial;
  reduce.col_partial_stride = width;
  reduce.col_scale = a.col_scale;
  reduce.new_col_scale = a.col_scale;
  reduce.eps = a.matrix.x.eps;
  for (int64_t k = 0; k < p.repeat; ++k) {
    for_chunks([&](int64_t chunk, int64_t begin, int64_t end) {
      const bool is_done =
          k == 0 && is_summed && a.skip_zero_scales && finish_first_round(a, threshold, begin, end);
      if (is_done) return;
      if (k == 0) set_live_rows(a, threshold, begin, end);
      Step(step, chunk, begin, end);
    });
    parallel_for(call.context, width, 1024,
                 [&](int64_t begin, int64_t end) { Reduce(reduce, begin, end); });
  }
  for_chunks([&](int64_t, int64_t begin, int64_t end) { Weights(a, begin, end); });
}

#if EHC_HAS_CUDA
struct DeviceScratch {
  double* sums;  // [P]
  int* finite;
  float* parts;  // [P*kSinkhornParts,hd]
  float* norms;  // [rows], or null

  DeviceScratch(Workspace& workspace, OptimizerStepArgs& a) {
    const int64_t width = a.matrix.x.width;
    const int64_t chunks = sinkhorn_chunks(a.rows);
    take_update_and_scales(workspace, a);
    sums = workspace.take<double>(chunks);
    finite = workspace.take<int>(1);
    parts = workspace.take<float>(chunks * kSinkhornParts * width);
    norms = width > kMostHeldWidth ? workspace.take<float>(a.rows) : nullptr;
  }
};

template <class P>
size_t device_workspace(const Call& call) {
  OptimizerStepArgs a = make_args(*static_cast<const P*>(call.params), call.bound);
  Workspace workspace(nullptr);
  DeviceScratch(workspace, a);
  return workspace.bytes();
}

template <class P>
void run_cuda(const Call& call) {
  constexpr const char* kName = "engram.optimizer_step";
  const P& p = *static_cast<const P*>(call.params);
  const int device = call.context.device_index();
  void* stream = call.context.stream();
  OptimizerStepArgs a = make_args(p, call.bound);
  Workspace workspace(call.context.workspace());
  const DeviceScratch scratch(workspace, a);
  const int64_t width = a.matrix.x.width;
  if (a.form == OptimizerStepArgs::Form::lazy) {  // afterwards it runs in place
    const int64_t rows = call.bound["rows"];
    optimizer_copy_cuda(a.weight, a.new_weight, rows, width, device, stream);
    optimizer_copy_cuda(a.momentum, a.new_momentum, rows, width, device, stream);
    a.weight = a.new_weight;
    a.momentum = a.new_momentum;
  }
  if (a.rows == 0) return;
  optimizer_momentum_cuda(a, scratch.sums, scratch.finite, device, stream);

  SinkhornStepArgs step;
  step.x = a.matrix.x;
  step.row_norm = scratch.norms;
  step.new_row_scale = a.row_scale;
  SinkhornReduceArgs reduce;
  reduce.partials = sinkhorn_chunks(a.rows);
  reduce.col_partial = scratch.parts;
  reduce.col_partial_stride = width;
  reduce.col_scale = a.col_scale;
  reduce.new_col_scale = a.col_scale;
  reduce.eps = a.matrix.x.eps;
  for (int64_t k = 0; k < p.repeat; ++k) {
    sinkhorn_parts_cuda(kName, step, a.rows, scratch.finite, scratch.parts, device, stream);
    sinkhorn_reduce_cuda(kName, reduce, width, kSinkhornParts, device, stream);
  }
  optimizer_weights_cuda(a, scratch.finite, device, stream);
}
#endif

template <class Real>
struct ReferenceScratch {
  Real* row_scale;
  Real* col_scale;
  Real* norms;

  ReferenceScratch(Workspace& workspace, OptimizerStepArgs& a) {
    take_update(workspace, a);
    row_scale = workspace.take<Real>(a.rows);
    col_scale = workspace.take<Real>(a.matrix.x.width);
    norms = workspace.take<Real>(a.rows);
  }
};

template <class P, class Real>
size_t reference_workspace(const Call& call) {
  OptimizerStepArgs a = make_args(*static_cast<const P*>(call.params), call.bound);
  Workspace workspace(nullptr);
  ReferenceScratch<Real>(workspace, a);
  return workspace.bytes();
}

template <class P, class Real>
void run_reference(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  OptimizerStepArgs a = make_args(p, call.bound);
  Workspace workspace(call.context.workspace());
  const ReferenceScratch<Real> s(workspace, a);
  start_lazy(call, a);
  optimizer_step_reference(a, p.repeat, s.row_scale, s.col_scale, s.norms);
}

template <class P>
constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda<P>, &device_workspace<P>},
#endif
#define EHC_LIST(isa)                                                    \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>,              \
   &run_cpu<P, &isa::optimizer_momentum_rows, &isa::sinkhorn_step_chunk, \
            &isa::sinkhorn_reduce_columns, &isa::optimizer_weight_rows>, \
   &cpu_workspace<P>},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<P, double>,
         &reference_workspace<P, double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<P, float>,
     &reference_workspace<P, float>},
};

constexpr Operator kDense =
    make_operator<OptimizerStep>(kDenseTable, kImplementations<OptimizerStep>);

template <class P>
constexpr Operator with_row_check(const Table& table) {
  Operator op = make_operator<P>(table, kImplementations<P>);
  op.rules = &check_rows<P>;
  return op;
}
constexpr Operator kSparse = with_row_check<OptimizerStepSparse>(kSparseTable);
constexpr Operator kLazy = with_row_check<OptimizerStepLazy>(kLazyTable);

}  // namespace

EHC_DEFINE_CALLS(optimizer_step, OptimizerStep, kDense);
EHC_DEFINE_CALLS(optimizer_step_sparse, OptimizerStepSparse, kSparse);
EHC_DEFINE_CALLS(optimizer_step_lazy, OptimizerStepLazy, kLazy);
EHC_REGISTER(optimizer_step, &kDense);

}  // namespace ehc::engram

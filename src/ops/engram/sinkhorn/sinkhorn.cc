#include "ehc/engram/sinkhorn.h"

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/engram/shared/optimizer_call.h"
#include "ops/engram/shared/sinkhorn_device.h"
#include "ops/engram/sinkhorn/sinkhorn_args.h"

namespace ehc::engram {

// `norms` [rows]: scratch.
template <class Real>
void sinkhorn_step_reference(const SinkhornStepArgs& args, Real* norms, int64_t chunk,
                             int64_t begin, int64_t end);
template <class Real>
void sinkhorn_reduce_reference(const SinkhornReduceArgs& args, int64_t begin, int64_t end);
template <class Real>
void sinkhorn_finalize_reference(const SinkhornFinalizeArgs& args, int64_t begin, int64_t end);
void sinkhorn_step_cuda(const SinkhornStepArgs& args, int64_t rows, float* parts, int device,
                        void* stream);
void sinkhorn_finalize_cuda(const SinkhornFinalizeArgs& args, int64_t rows, int device,
                            void* stream);

namespace {

template <class P>
ScaledUpdate scaled_update(const P& p, const Bound& b) {
  return {b["hd"],
          p.update.template as<float>(),
          p.update.stride[0],
          p.row_scale.template as<float>(),
          p.col_scale.template as<float>(),
          static_cast<float>(*p.eps)};
}

// --- step ---

constexpr auto kStepTable =
    table("engram.sinkhorn_step", "1.12b", "row norms and scales of an update, squares by column",
          in<&SinkhornStep::update>("update", "F32[rows,hd]"),
          in<&SinkhornStep::row_scale>("row_scale", "F32[rows]"),
          in<&SinkhornStep::col_scale>("col_scale", "F32[hd]"),
          attribute<&SinkhornStep::eps>("eps").positive(),
          out<&SinkhornStep::row_norm>("row_norm", "F32[rows]"),
          out<&SinkhornStep::new_row_scale>("row_scale", "F32[rows]").may_alias("row_scale"),
          out<&SinkhornStep::col_partial>("col_partial", "F32[P,hd]"), flops("7*rows*hd"));

void count_partials(Bound& bound, const void*) {
  bound.symbols.set(symbol("P"), sinkhorn_chunks(bound["rows"]));
}

SinkhornStepArgs step_args(const Call& call) {
  const SinkhornStep& p = *static_cast<const SinkhornStep*>(call.params);
  SinkhornStepArgs a;
  a.x = scaled_update(p, call.bound);
  a.row_norm = p.row_norm.as<float>();
  a.new_row_scale = p.new_row_scale.as<float>();
  a.col_partial = p.col_partial.as<float>();
  a.col_partial_stride = p.col_partial.stride[0];
  return a;
}

// Calls chunk(args, chunk, begin, end) for every chunk of rows.
template <class Chunk>
void run_step(const Call& call, const Chunk& chunk) {
  const SinkhornStepArgs a = step_args(call);
  const int64_t rows = call.bound["rows"];
  parallel_chunks(call.context, rows, sinkhorn_chunk_rows(rows),
                  [&](int64_t c, int64_t begin, int64_t end) { chunk(a, c, begin, end); });
}

template <auto Chunk>
void run_step_cpu(const Call& call) {
  run_step(call, Chunk);
}

template <class Real>
size_t step_workspace(const Call& call) {
  Workspace workspace(nullptr);
  workspace.take<Real>(call.bound["rows"]);
  return workspace.bytes();
}

template <class Real>
void run_step_reference(const Call& call) {
  Real* norms = Workspace(call.context.workspace()).take<Real>(call.bound["rows"]);
  run_step(call, [&](const SinkhornStepArgs& a, int64_t chunk, int64_t begin, int64_t end) {
    sinkhorn_step_reference(a, norms, chunk, begin, end);
  });
}

#if EHC_HAS_CUDA
float* take_parts(const Call& call, Workspace& workspace) {
  return workspace.take<float>(call.bound["P"] * kSinkhornParts * call.bound["hd"]);
}

size_t step_workspace_cuda(const Call& call) {
  Workspace workspace(nullptr);
  take_parts(call, workspace);
  return workspace.bytes();
}

void run_step_cuda(const Call& call) {
  Workspace workspace(call.context.workspace());
  sinkhorn_step_cuda(step_args(call), call.bound["rows"], take_parts(call, workspace),
                     call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kStepImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_step_cuda, &step_workspace_cuda},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_step_cpu<&isa::sinkhorn_step_chunk>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_step_reference<double>, &step_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_step_reference<float>, &step_workspace<float>},
};

constexpr Operator kStep = [] {
  Operator op = make_operator<SinkhornStep>(kStepTable, kStepImplementations);
  op.derive = &count_partials;
  return op;
}();

// --- reduce ---

constexpr auto kReduceTable = table(
    "engram.sinkhorn_step_reduce", "1.12c", "squares by column of all rows, and the column scales",
    in<&SinkhornStepReduce::col_partial>("col_partial", "F32[P,hd]"),
    in<&SinkhornStepReduce::col_scale>("col_scale", "F32[hd]").optional(),
    attribute<&SinkhornStepReduce::eps>("eps").positive().required_with("col_scale"),
    out<&SinkhornStepReduce::col_sumsq>("col_sumsq", "F32[hd]"),
    out<&SinkhornStepReduce::new_col_scale>("col_scale", "F32[hd]", "col_scale")
        .may_alias("col_scale"),
    flops("P*hd"), flops("3*hd", "col_scale"));

SinkhornReduceArgs reduce_args(const Call& call) {
  const SinkhornStepReduce& p = *static_cast<const SinkhornStepReduce*>(call.params);
  SinkhornReduceArgs a;
  a.partials = call.bound["P"];
  a.col_partial = p.col_partial.as<float>();
  a.col_partial_stride = p.col_partial.stride[0];
  a.col_sumsq = p.col_sumsq.as<float>();
  if (p.col_scale) {
    a.col_scale = p.col_scale.as<float>();
    a.new_col_scale = p.new_col_scale.as<float>();
    a.eps = static_cast<float>(*p.eps);
  }
  return a;
}

template <auto Columns>
void run_reduce(const Call& call) {
  const SinkhornReduceArgs a = reduce_args(call);
  parallel_for(call.context, call.bound["hd"], 1024,
               [&](int64_t begin, int64_t end) { Columns(a, begin, end); });
}

#if EHC_HAS_CUDA
void run_reduce_cuda(const Call& call) {
  sinkhorn_reduce_cuda("engram.sinkhorn_step_reduce", reduce_args(call), call.bound["hd"], 1,
                       call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kReduceImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_reduce_cuda, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_reduce<&isa::sinkhorn_reduce_columns>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reduce<&sinkhorn_reduce_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_reduce<&sinkhorn_reduce_reference<float>>,
     nullptr},
};

constexpr Operator kReduce =
    make_operator<SinkhornStepReduce>(kReduceTable, kReduceImplementations);

// --- finalize ---

constexpr auto kFinalizeTable = table(
    "engram.sinkhorn_finalize", "1.12d", "an update with rows of equal norm",
    in<&SinkhornFinalize::update>("update", "F32[rows,hd]"),
    in<&SinkhornFinalize::row_scale>("row_scale", "F32[rows]"),
    in<&SinkhornFinalize::col_scale>("col_scale", "F32[hd]"),
    attribute<&SinkhornFinalize::eps>("eps").positive(),
    attribute<&SinkhornFinalize::alpha>("alpha").positive(),
    out<&SinkhornFinalize::out>("out", "F32[rows,hd]").may_alias("update"), flops("5*rows*hd"));

SinkhornFinalizeArgs finalize_args(const Call& call) {
  const SinkhornFinalize& p = *static_cast<const SinkhornFinalize*>(call.params);
  SinkhornFinalizeArgs a;
  a.x = scaled_update(p, call.bound);
  a.alpha = static_cast<float>(*p.alpha);
  a.out = p.out.as<float>();
  a.out_stride = p.out.stride[0];
  a.streaming = static_cast<size_t>(2 * call.bound["rows"] * a.x.width) * sizeof(float) >
                last_level_cache_bytes();
  return a;
}

template <auto Rows>
void run_finalize(const Call& call) {
  const SinkhornFinalizeArgs a = finalize_args(call);
  const int64_t rows = call.bound["rows"];
  parallel_for(call.context, rows, rows_of_grain(a.x.width),
               [&](int64_t begin, int64_t end) { Rows(a, begin, end); });
}

constexpr Implementation kFinalizeImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr,
     &run_range_on_device<&finalize_args, &sinkhorn_finalize_cuda, symbol("rows")>, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_finalize<&isa::sinkhorn_finalize_rows>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_finalize<&sinkhorn_finalize_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_finalize<&sinkhorn_finalize_reference<float>>,
     nullptr},
};

constexpr Operator kFinalize =
    make_operator<SinkhornFinalize>(kFinalizeTable, kFinalizeImplementations);

}  // namespace

EHC_DEFINE_CALLS(sinkhorn_step, SinkhornStep, kStep);
EHC_DEFINE_CALLS(sinkhorn_step_reduce, SinkhornStepReduce, kReduce);
EHC_DEFINE_CALLS(sinkhorn_finalize, SinkhornFinalize, kFinalize);
EHC_REGISTER(sinkhorn, &kStep, &kReduce, &kFinalize);

int64_t sinkhorn_partials(int64_t rows) { return rows <= 0 ? 0 : sinkhorn_chunks(rows); }

}  // namespace ehc::engram

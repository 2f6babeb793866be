#include "ehc/mhc/plan_recompute.h"

#include <limits>

#include "core/registry.h"
#include "ops/mhc/plan_recompute/plan_recompute_args.h"

namespace ehc::mhc {

namespace {

using P = PlanRecompute;

constexpr auto kTable =
    table("mhc.plan_recompute", "2.12", "how many layers to recompute at a time",
          attribute<&P::layers>("layers").at_least(1), attribute<&P::n>("n").between(1, 8),
          attribute<&P::d>("d").at_least(1),
          attribute<&P::stages>("stages").at_least(1).computed_default("layers"),
          out<&P::block_length>("block_length", "I32[1]").packed(),
          out<&P::terms>("terms", "I64[2]").packed(),
          out<&P::block_starts>("block_starts", "I32[blocks]").packed());

[[noreturn]] void refuse(std::string_view attribute, const std::string& expected, int64_t got) {
  fail_attribute(kTable.view(), attribute, expected, std::to_string(got));
}

// Without `stages` all layers are one.
std::span<const int64_t> stages_of(const P& p) {
  return p.stages.data() != nullptr ? p.stages : std::span(&*p.layers, 1);
}

// Of arguments that are there and in their ranges.
RecomputePlan checked_plan(const P& p) {
  constexpr int64_t kMostLayers = std::numeric_limits<int32_t>::max();
  if (*p.layers > kMostLayers) {
    refuse("layers", "at most " + std::to_string(kMostLayers), *p.layers);
  }
  int64_t sum = 0;
  for (const int64_t layers : stages_of(p)) {
    if (__builtin_add_overflow(sum, layers, &sum)) sum = std::numeric_limits<int64_t>::max();
  }
  if (sum != *p.layers) {
    refuse("stages", "a sum of 'layers' = " + std::to_string(*p.layers), sum);
  }
  const RecomputePlan plan = search_recompute_plan(*p.n, stages_of(p));
  int64_t product = 0;
  if (__builtin_mul_overflow(*p.n * plan.blocks, *p.d, &product) ||
      __builtin_mul_overflow((*p.n + 2) * plan.block_length, *p.d, &product)) {
    refuse("d", "terms up to 2^63-1", *p.d);
  }
  return plan;
}

void count_blocks(Bound& bound, const void* params) {
  bound.symbols.set(symbol("blocks"), checked_plan(*static_cast<const P*>(params)).blocks);
}

void run(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const RecomputePlan plan = checked_plan(p);
  *p.block_length.as<int32_t>() = static_cast<int32_t>(plan.block_length);
  p.terms.as<int64_t>()[0] = *p.n * *p.d * plan.blocks;
  p.terms.as<int64_t>()[1] = (*p.n + 2) * *p.d * plan.block_length;
  auto* start = p.block_starts.as<int32_t>();
  int64_t first = 0;  // layer of the stage
  for (const int64_t layers : stages_of(p)) {
    for (int64_t l = 0; l < layers; l += plan.block_length) {
      *start++ = static_cast<int32_t>(first + l);
    }
    first += layers;
  }
}

constexpr Implementation kImplementations[] = {
    {"reference", Device::cpu, nullptr, &run, nullptr},
};

constexpr Operator kPlanRecompute = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.derive = &count_blocks;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(plan_recompute, PlanRecompute, kPlanRecompute);
EHC_REGISTER(plan_recompute, &kPlanRecompute);

int64_t count_recompute_blocks(const PlanRecompute& params) {
  const Arguments args = {&params, nullptr, nullptr};
  FrontDoor door(kPlanRecompute.schema, args);
  door.bind_inputs(kPlanRecompute.derive);
  return door.bound()["blocks"];
}

}  // namespace ehc::mhc

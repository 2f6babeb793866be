// An operator at run time: its table, the rules that a table cannot say, and the ordered list of
// its implementations.
#pragma once

#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/bind.h"
#include "core/schema_builder.h"
#include "ehc/context.h"

namespace ehc {

struct Call {
  Context& context;
  const Bound& bound;
  const void* params;  // checked, leading dimensions flattened
};

// One way to compute an operator. The list goes from the most special to the reference; the first
// that does not refuse runs.
struct Implementation {
  std::string_view name;  // "cpu.avx512", "cuda", "reference"
  Device device = Device::cpu;
  // Why this call cannot run here, or empty; the text is static. Null: never refuses.
  std::string_view (*refuse)(const Call& call) = nullptr;
  void (*run)(const Call& call) = nullptr;
  // Bytes of scratch that `run` needs. Null: none.
  size_t (*workspace)(const Call& call) = nullptr;
};

// Whether `wanted` names the implementation or its family ("cpu" all "cpu.*"), or is empty. Where
// an implementation has the very name of a family ("cuda"), a call gets it and not the family.
bool names_implementation(std::string_view wanted, std::string_view name);

struct Operator {
  Schema schema;
  std::span<const Implementation> implementations;
  Derive derive = nullptr;
  // Rules in code; throws Error{contract}. Null: none.
  void (*rules)(const Schema& schema, const Bound& bound, const void* params) = nullptr;
  void (*construct)(void* params) = nullptr;
};

// Completes an operator for its parameter struct.
template <class P>
constexpr Operator make_operator(const Table& table, std::span<const Implementation> list) {
  static_assert(std::is_trivially_copyable_v<P>);
  Operator op{};
  op.schema = table.view();
  op.implementations = list;
  op.schema.params_size = sizeof(P);
  op.construct = [](void* at) { new (at) P(); };
  return op;
}

// The front door alone: everything that `invoke` checks before it chooses an implementation.
Bound check_call(const Operator& op, const Arguments& args, Device device, int device_index);

// Checks and runs.
void invoke(const Operator& op, Context& context, const Arguments& args);

// What a call would do. Made without running it, for people and for callers that lend workspace.
struct Plan {
  struct Refusal {
    std::string_view implementation;
    std::string_view reason;
  };
  std::string_view implementation;
  std::vector<Refusal> refused;  // those of the list before it
  size_t workspace_bytes = 0;
};
// Checks like `invoke` (but for the workspace), and throws what it throws.
Plan plan(const Operator& op, const Context& context, const Arguments& args);

// The same for a typed C++ call.
template <class P>
void invoke(const Operator& op, Context& context, const P& params) {
  alignas(P) std::byte flattened[sizeof(P)];
  invoke(op, context, Arguments{&params, nullptr, flattened});
}
template <class P>
Plan plan(const Operator& op, const Context& context, const P& params) {
  alignas(P) std::byte flattened[sizeof(P)];
  return plan(op, context, Arguments{&params, nullptr, flattened});
}

}  // namespace ehc

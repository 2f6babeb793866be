// What a case must move, by its operator's table and its shapes.
#pragma once

#include <optional>
#include <vector>

#include "cli/case_inputs.h"

namespace ehc::cli {

// Bytes of a call: every present input once, of tables that indices address only the rows touched,
// every output once (in place, too, an element is read and written), and the passes over the
// workspace that the table names.
struct Traffic {
  double batch = 0;      // of tensors that grow with the batch axis
  double shared = 0;     // of all others: parameters, their gradients, state
  double partials = 0;   // of sums by chunk of the batch
  double workspace = 0;  // of passes over the workspace
  [[nodiscard]] double total() const { return batch + shared + partials + workspace; }
};

// `outputs` by slot. Where a case's indices have no values every one of them addresses a row.
Traffic traffic_of(const CaseInputs& inputs, const std::vector<Tensor>& outputs);

// What an operator's batch consists of: tokens, table rows or, of a vocabulary, its entries.
std::optional<Symbol> batch_axis(const Schema& schema);

// Must blocks of a kernel that split the batch between them add up what each has? True where an
// output is a sum over the batch, or partial sums.
bool crosses_blocks(const Schema& schema);

}  // namespace ehc::cli

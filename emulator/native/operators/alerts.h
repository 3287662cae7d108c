// Operators whose CUDA code is not deterministic, and says so where a program asks for deterministic algorithms.
#pragma once

#include "operator.h"

namespace emulator {

struct Alert {
  const char* op;      // without overload
  const char* caller;  // who is not deterministic, in torch's words
  // Whether the call with these arguments is not deterministic. Null: each call is.
  bool (*concerns)(const Operator& op, const Values& arguments);
};

const Alert* alert_of(const std::string& bare_name);

// Raises or warns as torch's CUDA code does.
void raise_alert(const Operator& op, const Values& arguments);

std::vector<std::string> names_of_alerts();

}  // namespace emulator

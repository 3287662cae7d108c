// Operators that torch's CUDA code first brings into another form: with copies to the device, reads of the device, and
// checks of its own.
#pragma once

#include "operator.h"

namespace emulator {

// What an operator does to its arguments before its kernel is launched. Null: nothing.
using Preparation = void (*)(Values&);
Preparation preparation_of(const std::string& name);

// A kernel of ours for an operator that is more than one launch. Null: emulate() does it.
using Form = void (*)(const Operator&, torch::jit::Stack*);
Form form_of(const std::string& name);

}  // namespace emulator

// Prints the instruction sets that this machine runs, `;` between them: CMakeLists.txt asks.

#include "machine.h"

#include <cstdio>

int main() {
  const char* between = "";
  for (const auto& name : penstock::sets_of_machine()) {
    std::printf("%s%s", between, name.c_str());
    between = ";";
  }
}

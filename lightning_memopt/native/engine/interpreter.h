// Torch asks its table of Python functions to dispatch an op to a mode. While a planned forward runs, this table stands in its
// place: ops that match their templates are run in C++, everything else goes to torch's own table.
#pragma once

namespace memopt {

// A planned forward begins, or ends. They may be nested, and run in several threads.
void begin_forward();
void end_forward();

}  // namespace memopt

// The process's threads for kernels: started at the first parallel call, so after any fork; a forked child starts its
// own.  Items are taken in any order by any thread; no result may depend on which.
//
// Beside its own threads a process may have guests: one for each seat at somebody else's cores.  A guest looks before
// every item whether the owner is still idle, and sleeps when not.  Waking it costs more than small work is worth.
#pragma once

#include <cstddef>
#include <vector>

#include "threads/core_lending.hpp"

namespace penstock {

using ItemFn = void (*)(void* context, long item, int worker);

// Own threads that work on one call, the caller included (at least 1).  Takes effect at the next call.
void set_threads(int count);
int thread_count();

// Where guests may work.  Ends the threads that there are; not while a call runs.
void set_guests(std::vector<Seat> seats);

// The most threads that can work on one call, guests included: the number that work is cut for.
int hands();

// Seconds that guests have computed, all together.
double guest_seconds();

// Calls fn for every item from 0 to items - 1 (below 2^31) and returns when all are done.  Calls do not nest, and only
// one may run at a time.  `work` (multiply-adds, or cells read) tells whether guests are worth waking.
void parallel(long items, void* context, ItemFn fn, double work = 0);

// Scratch memory of one worker, 64-byte aligned, at least `bytes`; its content is lost at the next call.
void* workspace(int worker, size_t bytes);

// The same for the caller of `parallel`, readable by all workers.
void* shared_workspace(size_t bytes);

}  // namespace penstock

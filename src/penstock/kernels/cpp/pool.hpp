// The process's threads for kernels: started at the first parallel call, so after any fork; a forked child starts its
// own.  Items are taken in any order by any thread; no result may depend on which.
#pragma once

#include <cstddef>

namespace penstock {

using ItemFn = void (*)(void* context, long item, int worker);

// Threads that work on one call, the caller included (at least 1).  Takes effect at the next call.
void set_threads(int count);
int thread_count();

// Calls fn for every item from 0 to items - 1 (below 2^31) and returns when all are done.  Calls do not nest, and only
// one may run at a time.
void parallel(long items, void* context, ItemFn fn);

// Scratch memory of one worker, 64-byte aligned, at least `bytes`; its content is lost at the next call.
void* workspace(int worker, size_t bytes);

// The same for the caller of `parallel`, readable by all workers.
void* shared_workspace(size_t bytes);

}  // namespace penstock

// OpenMP threads between two kernels.

#include "vector.h"

#ifdef _OPENMP
#include <omp.h>
#endif

// Ends the worker threads of the calling thread.
WEFT_EXPORT void weft_release_threads() {
#ifdef _OPENMP
    omp_pause_resource_all(omp_pause_soft);
#endif
}

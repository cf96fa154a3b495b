/* Functions for Callgrind's client requests, because Python cannot call macros. */
#include <valgrind/callgrind.h>

void start(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

/* Writes the counts since start() to a new file that begins with the name. */
void stop(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}

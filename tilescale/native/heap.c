#include "ts_rt.h"

#include "ts_rt.h"
#include <stdio.h>
int32_t ts_world_rank(void) { return 0; }
int ts_others_failed(char* out, size_t bytes) { (void)out, (void)bytes; return 0; }
int ts_rank_gone(int32_t world_rank, char* out, size_t bytes) { (void)world_rank, (void)out, (void)bytes; return 0; }
int ts_team_of_args(const ts_kernel* K, const ts_arg* args, struct ts_team** team) { (void)K, (void)args; *team = NULL; return 0; }
int32_t ts_team_rank(const struct ts_team* team) { (void)team; return 0; }
int32_t ts_team_size(const struct ts_team* team) { (void)team; return 1; }
int32_t ts_team_member(const struct ts_team* team, int32_t rank) { (void)team; return rank; }
void ts_team_enter(ts_launch* L) { (void)L; }
void ts_team_leave(ts_launch* L) { (void)L; }
void ts_touch(ts_fiber* f, int32_t rank, int32_t site) { (void)f, (void)rank, (void)site; }
_Atomic int64_t* ts_team_word(const struct ts_team* team, int32_t rank, int32_t block) { (void)team, (void)rank, (void)block; return NULL; }
void ts_describe_launch(const ts_launch* L, int32_t rank, char* out, size_t bytes) { (void)L, (void)rank; snprintf(out, bytes, "%s", ""); }
TS_API void* ts_peer(void* ctx, void* p, int32_t rank, int32_t site) { if (rank) ts_raise(ctx, site, "rank %d is out of range: the team has 1", rank); return p; }

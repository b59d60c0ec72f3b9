/** @file kvc/kvc.h
 * All of libkvc.
 */
#ifndef KVC_H
#define KVC_H

#include "attend.h"
#include "base.h"
#include "cache.h"
#include "gate.h"
#include "merge.h"
#include "plan.h"
#include "policy.h"
#include "prune.h"
#include "quant.h"
#include "rope.h"
#include "score.h"
#include "smooth.h"

#endif

/** @file kvc/kvc.h
 * All of libkvc.
 */
#ifndef KVC_H
#define KVC_H

#include "base.h"
#include "cache.h"
#include "quant.h"

#endif

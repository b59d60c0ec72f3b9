// header_test.cpp - the same in C++.
#include "header_test.c"

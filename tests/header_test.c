/* header_test.c - compiled for each public header: it must stand alone, twice, as C11 and C++17. */
#include KVC_TEST_HEADER
#include KVC_TEST_HEADER

int main(void)
{
    return 0;
}

/* UTF-8, byte by byte. */
#include "utf8.h"

/* Bytes that a lead byte announces; 0 for a byte that starts nothing. */
static size_t announced(unsigned char lead)
{
    if (lead < 0x80)
        return 1;
    if (lead >= 0xc2 && lead < 0xe0)
        return 2;
    if (lead >= 0xe0 && lead < 0xf0)
        return 3;
    return lead >= 0xf0 && lead < 0xf5 ? 4 : 0;
}

size_t utf8_decode(const char *text, size_t size, uint32_t *code_point)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    const size_t n = size > 0 ? announced((unsigned char)text[0]) : 0;

    if (n == 0 || n > size)
        return 0;
    uint32_t c = n == 1 ? (unsigned char)text[0] : (unsigned char)text[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | ((unsigned char)text[i] & 0x3fu);
    }
    if (c < smallest[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return 0;
    *code_point = c;
    return n;
}

size_t utf8_complete(const char *text, size_t size)
{
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        const unsigned char c = (unsigned char)text[size - back];
        if ((c & 0xc0) == 0x80)
            continue;
        return announced(c) > back ? size - back : size;
    }
    return size;
}

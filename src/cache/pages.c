/* pages.c - the pool: slabs that serve one page size at a time and return when they are empty. */
#include <string.h>

#include "state.h"

static void slab_unlink(struct kvc_cache *cache, int32_t *head, int32_t i)
{
    struct kvc_slab *slab = &cache->slabs[i];
    if (slab->prev >= 0)
        cache->slabs[slab->prev].next = slab->next;
    else
        *head = slab->next;
    if (slab->next >= 0)
        cache->slabs[slab->next].prev = slab->prev;
}

static void slab_link(struct kvc_cache *cache, int32_t *head, int32_t i)
{
    cache->slabs[i].prev = -1;
    cache->slabs[i].next = *head;
    if (*head >= 0)
        cache->slabs[*head].prev = i;
    *head = i;
}

/* Gives a free slab to a class; the caller knows that there is one. */
static void slab_assign(struct kvc_cache *cache, int32_t page_class)
{
    struct kvc_page_class *c = &cache->classes[page_class];
    const int32_t i = cache->free_slabs;
    struct kvc_slab *slab = &cache->slabs[i];
    const int32_t first = i * (int32_t)cache->max_per_slab;

    slab_unlink(cache, &cache->free_slabs, i);
    cache->n_free_slabs--;
    slab->page_class = page_class;
    slab->n_used = 0;
    slab->free_page = first;
    for (int32_t p = 0; p < (int32_t)c->per_slab; p++)
        cache->pages[first + p].next_free = p + 1 < (int32_t)c->per_slab ? first + p + 1 : -1;
    slab_link(cache, &c->slabs, i);
    c->n_free += (int32_t)c->per_slab;
}

static uint8_t class_find(struct kvc_cache *cache, uint32_t n_bytes)
{
    int32_t i = 1; /* class 0 shares with nobody: its slabs are reserved */
    while (i < cache->n_classes && cache->classes[i].n_bytes != n_bytes)
        i++;
    if (i == cache->n_classes) {
        cache->classes[i] = (struct kvc_page_class){
            .n_bytes = n_bytes,
            .per_slab = (uint32_t)(cache->slab_bytes / n_bytes),
            .slabs = -1,
        };
        cache->n_classes++;
    }
    return (uint8_t)i;
}

void kvc_pages_init(kvc_cache *cache, size_t reserved_pages)
{
    const uint32_t open = cache->layouts[KVC_LAYOUT_OPEN].n_bytes;

    cache->n_classes = 1;
    cache->classes[0] = (struct kvc_page_class){
        .n_bytes = open,
        .per_slab = (uint32_t)(cache->slab_bytes / open),
        .slabs = -1,
    };
    memset(cache->class_of, UINT8_MAX, KVC_N_LAYOUTS);
    cache->class_of[KVC_LAYOUT_OPEN] = 0;
    cache->free_slabs = -1;
    cache->n_free_slabs = (int32_t)cache->n_slabs;
    for (int32_t i = (int32_t)cache->n_slabs - 1; i >= 0; i--) {
        cache->slabs[i].page_class = -1;
        slab_link(cache, &cache->free_slabs, i);
    }
    while ((size_t)cache->classes[0].n_free < reserved_pages)
        slab_assign(cache, 0);
}

int32_t kvc_page_class(kvc_cache *cache, int32_t layout)
{
    if (cache->class_of[layout] == UINT8_MAX)
        cache->class_of[layout] = class_find(cache, cache->layouts[layout].n_bytes);
    return cache->class_of[layout];
}

bool kvc_pages_fit(const kvc_cache *cache, const int32_t *need)
{
    int64_t slabs = 0;
    for (int32_t i = 1; i < cache->n_classes; i++) {
        const struct kvc_page_class *c = &cache->classes[i];
        if (need[i] > c->n_free)
            slabs += (need[i] - c->n_free + (int32_t)c->per_slab - 1) / (int32_t)c->per_slab;
    }
    return slabs == 0 || slabs + cache->n_kept_slabs <= cache->n_free_slabs;
}

int32_t kvc_page_alloc(kvc_cache *cache, uint8_t layout)
{
    const int32_t page_class = kvc_page_class(cache, layout);
    struct kvc_page_class *c = &cache->classes[page_class];

    if (c->n_free == 0) {
        if (page_class == 0 || cache->n_free_slabs == 0)
            return -1;
        slab_assign(cache, page_class);
    }
    const int32_t i = c->slabs, page = cache->slabs[i].free_page;
    cache->slabs[i].free_page = cache->pages[page].next_free;
    cache->slabs[i].n_used++;
    c->n_free--;
    c->n_used++;
    if (cache->slabs[i].free_page < 0)
        slab_unlink(cache, &c->slabs, i);
    cache->pages[page] =
        (struct kvc_page){.owners = 1, .twin = -1, .twin_of = -1, .layout = layout};
    return page;
}

void kvc_page_share(kvc_cache *cache, int32_t page)
{
    cache->pages[page].owners++;
}

void kvc_page_forget_twin(kvc_cache *cache, int32_t page)
{
    struct kvc_page *p = &cache->pages[page];
    if (p->twin >= 0)
        cache->pages[p->twin].twin_of = -1;
    if (p->twin_of >= 0)
        cache->pages[p->twin_of].twin = -1;
    p->twin = p->twin_of = -1;
}

void kvc_page_release(kvc_cache *cache, int32_t page)
{
    struct kvc_page *p = &cache->pages[page];
    if (--p->owners > 0)
        return;
    kvc_page_forget_twin(cache, page);

    const int32_t i = page / (int32_t)cache->max_per_slab;
    struct kvc_slab *slab = &cache->slabs[i];
    struct kvc_page_class *c = &cache->classes[slab->page_class];
    if (slab->free_page < 0)
        slab_link(cache, &c->slabs, i);
    p->next_free = slab->free_page;
    slab->free_page = page;
    slab->n_used--;
    c->n_used--;
    c->n_free++;
    if (slab->n_used == 0 && slab->page_class != 0) {
        c->n_free -= (int32_t)c->per_slab;
        slab_unlink(cache, &c->slabs, i);
        slab->page_class = -1;
        slab_link(cache, &cache->free_slabs, i);
        cache->n_free_slabs++;
    }
}

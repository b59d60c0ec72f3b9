/* merge_error.c - what merging and dropping rows does to an output. */
#include "merge.h"

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* The terms for one difference of the logits; *mass_part and *value_part are those of the error. */
static void loss_at(const kvc_merge_query *q, double difference, kvc_merge_loss *loss,
                    double *mass_part, double *value_part)
{
    const double y_a = difference + (double)q->bias_a, y_b = (double)q->bias_b, m = (double)q->mass;
    const double lse = larger(y_a, y_b) + log1p(exp(-fabs(y_a - y_b)));
    const double deficit = lse - ((double)q->w_a * difference + (double)q->bias);
    const double share = 1.0 / (1.0 + exp(y_b - y_a));
    const double merged = m == 0.0 || m == 1.0 ? m : 1.0 / (1.0 + (1.0 - m) / m * exp(deficit));

    *mass_part = fabs(merged - m) * (double)q->rest_distance;
    *value_part = m * fabs((double)q->w_a - share) * (double)q->value_distance;
    loss->deficit = (float)deficit;
    loss->share_a = (float)share;
    loss->merged_mass = (float)merged;
    loss->error = (float)(*mass_part + *value_part);
}

kvc_status kvc_merge_error(const kvc_merge_query *query, kvc_merge_loss *loss)
{
    kvc_merge_query q;
    kvc_merge_loss one = {0}, other = {0};
    double mass[2], value[2];

    KVC_CHECK(query && loss && loss->struct_size >= sizeof(*loss), KVC_E_ARG);
    KVC_TRY(kvc_struct_read(&q, sizeof(q), query, sizeof(q)));
    KVC_CHECK(q.mass >= 0.0f && q.mass <= 1.0f && isfinite(q.difference) &&
                  (!q.within || q.difference >= 0.0f) && q.w_a >= 0.0f && q.w_a <= 1.0f &&
                  isfinite(q.bias_a) && isfinite(q.bias_b) && isfinite(q.bias) &&
                  is_amount(q.value_distance) && is_amount(q.rest_distance),
              KVC_E_ARG);
    loss_at(&q, (double)q.difference, &one, &mass[0], &value[0]);
    if (q.within) { /* the deficit is convex, the share monotone: the worst is at an end */
        loss_at(&q, -(double)q.difference, &other, &mass[1], &value[1]);
        one = other.error > one.error ? other : one;
        one.error = (float)(larger(mass[0], mass[1]) + larger(value[0], value[1]));
    }
    kvc_struct_write(loss, &one, sizeof(one));
    return KVC_OK;
}

kvc_status kvc_drop_error(float mass, float distance, float *error)
{
    KVC_CHECK(error && mass >= 0.0f && mass < 1.0f && is_amount(distance), KVC_E_ARG);
    *error = mass / (1.0f - mass) * distance;
    return KVC_OK;
}

kvc_status kvc_merge_cost(const kvc_merge_token *a, const kvc_merge_token *b, float robustness,
                          float mean_mass, float spread, float value_norm, float value_distance,
                          float *cost)
{
    KVC_CHECK(a && b && cost && tokens_ok(a, 1) && tokens_ok(b, 1) && is_amount(robustness) &&
                  is_amount(mean_mass) && is_amount(spread) && is_amount(value_norm) &&
                  is_amount(value_distance),
              KVC_E_ARG);
    const float mass = a->mass + b->mass + robustness * mean_mass * (a->size + b->size);
    *cost = mass * (spread / 8.0f * value_norm + sqrtf(spread) / 4.0f * value_distance);
    return KVC_OK;
}

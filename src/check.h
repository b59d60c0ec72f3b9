/* check.h - the two macros with which every public function starts. */
#ifndef KVC_CHECK_H
#define KVC_CHECK_H

#define KVC_CHECK(cond, status)                                                                    \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return (status);                                                                       \
    } while (0)

#define KVC_TRY(call)                                                                              \
    do {                                                                                           \
        const kvc_status status_ = (call);                                                         \
        if (status_ != KVC_OK)                                                                     \
            return status_;                                                                        \
    } while (0)

#endif

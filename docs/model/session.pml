/* The session protocol between one owner and the allocators behind one name: attach, report, step and replay.
 *
 * The three processes below follow the product's state machines rule by rule; README.md says which line stands for
 * which method. A pool is real, only tiny: a block has a holder (one sequence) and the digest that is published for it;
 * a grow hits what is cached, or is granted any free block; commits publish, frees let go. The owner writes content
 * into pages, so that a hit can be read back. What is checked are the assertions, named after the invariants I1 to I9
 * of the protocol, and the end of every run: when faults stop, every operation comes to be answered.
 *
 * Each rule can be broken: -DMISTAKE=n plants number n of the list below, and the checker must notice. `make model`.
 */

/* -- bounds ------------------------------------------------------------------------------------------------------- */
#ifndef OPS
#define OPS 3        /* operations that are asked for, of all lives of the owner together */
#endif
#ifndef FAULTS
#define FAULTS 2     /* of any kind; they may stop earlier */
#endif
#ifndef KINDS
#define KINDS 127    /* of faults, as a sum of the numbers below */
#endif
#ifndef ALLOCATORS
#define ALLOCATORS 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef CONTENTS
#define CONTENTS 2   /* different prompts, each of one block */
#endif
#ifndef WINDOW
#define WINDOW 2     /* steps that may be unanswered */
#endif
#ifndef SLOTS
#define SLOTS 3      /* streams at a time: the current one, and dead ones whose messages may still arrive */
#endif
#ifndef BEATS
#define BEATS 0      /* whether heartbeats acknowledge, and not only the next step */
#endif
#define ROOM 3       /* messages under way on a stream in one direction */

/* -- faults ------------------------------------------------------------------------------------------------------- */
#define LOSS    1    /* the owner leaves its stream; what it sent may still arrive, at any time or never */
#define CRASH   2    /* an allocator forgets everything; answers that are under way arrive, or do not */
#define EXPIRY  4    /* a lease ends although its owner lives */
#define RESTART 8    /* the owner dies; its next life has another incarnation and empty pages */
#define RIVAL   16   /* another process of the same pool name attaches and reports an empty pool */
#define DEFECT  32   /* an invariant breaks in the middle of a step: the pool is quarantined */
#define DEVICE  64   /* the forward pass fails after an answer: nothing was written into the block */
#define strikes(fault) (faults > 0 && (KINDS & fault))

/* -- mistakes that can be planted: number, then rule or invariant: what is wrong ------------------------------------ */
#ifndef MISTAKE
#define MISTAKE 0
#endif
#define mistake(name) (MISTAKE == name)
#define OLD_EPOCH_TAKES_OVER         1  /* rule 3: an epoch that was seen is not refused */
#define RIVAL_DISPLACES              2  /* rule 3: another incarnation attaches while the lease lives */
#define OLD_STREAM_SERVED            3  /* rule 3: a newer stream does not end the older one */
#define OLD_STREAM_DISCONNECTS       4  /* rule 3: the end of an older stream counts as that of the current one */
#define EPOCH_STANDS_STILL           5  /* rule 2: the owner attaches under the same epoch again */
#define INCARNATION_SURVIVES         6  /* rule 2: the next life of the owner has the incarnation of the last */
#define NUMBERS_PROVE_STATE          7  /* rule 4: resumed where the step numbers fit */
#define ANY_SESSION_RESUMED          8  /* rule 4: resumed wherever there is a state */
#define DEFECT_KEEPS_SESSION         9  /* rule 13: a quarantined pool can be resumed */
#define REPORT_KEEPS_SESSION        10  /* rule 5: a report does not change the session id */
#define REPORT_KEEPS_NUMBER         11  /* rule 5: a report does not set the next number */
#define REPORT_KEEPS_BLOCKS         12  /* rule 5: a report does not replace what is there */
#define LEDGER_SURVIVES             13  /* rule 5: the next life of the owner reports what its pages no longer hold */
#define READY_AT_FIRST_CHUNK        14  /* rule 5: grants are made before the report is whole */
#define CUT_REPORT_GOES_ON          15  /* rule 5: what was staged outlives its stream, and the next report adds to it */
#define REPORT_WITHOUT_CACHED       16  /* rule 5: the owner reports only blocks that are held */
#define REPORT_NAMES_OLDER_STEP     17  /* rule 5: the owner reports another step than its last one */
#define STEP_APPLIED_AGAIN          18  /* rule 8: a repeated step is applied a second time */
#define ANSWERS_NOT_KEPT            19  /* rule 8: a repeated step has no answer */
#define ONE_ANSWER_KEPT             20  /* rule 8: fewer answers are kept than the window has steps */
#define ACK_FORGETS_ONE_MORE        21  /* rule 8: the answer after the acknowledged one is forgotten too */
#define WRONG_ANSWER_REPLAYED       22  /* rule 8: a repeated step gets the newest answer, whichever it is */
#define RESENT_WITH_NEWER_ACK       23  /* rule 9: after a resume other bytes are sent under the same number */
#define REPLACED_AFTER_RESUME       24  /* rule 9: after a resume another operation is sent under the same number */
#define NOT_RESENT_AFTER_RESUME     25  /* rule 9: after a resume unanswered steps are not sent again */
#define NOT_RESENT_AFTER_READY      26  /* rule 9: after a report unanswered steps are not sent again */
#define RESUME_SKIPS_APPLIED        27  /* rule 9: after a resume the owner takes what was applied for answered */
#define OLD_STREAM_READ             28  /* rule 9: the owner takes answers from streams that it left */
#define COMMIT_BEFORE_COMPUTED      29  /* rule 6: a block is committed whose forward pass failed */
#define EVENTS_BEFORE_ACK           30  /* rule 12: watchers are told of a step as soon as it is applied */
#define EXPIRED_STREAM_SERVED       31  /* rule 11: the stream of an owner whose lease ended is not ended */
#define LEASE_NEVER_ENDS            32  /* rule 11: the pool of an owner that died is kept for ever */

#define NONE 255
mtype = { ATTACH, CHUNK, REPORT_END, STEP, BEAT,                               /* from the owner */
          RESUMED, REPORT_REQUIRED, READY, REPLY, ERROR,                       /* from an allocator */
          POOL_OWNED, FENCED, SESSION_UNKNOWN, STEP_GAP, STEP_MISMATCH, QUARANTINED, IDLE, GONE,       /* errors */
          UNUSED, ATTACHING, REPORTING, OPEN, ENDED,                           /* phases */
          GROW, COMMIT, FREE,                                                  /* operations */
          GRANTED, HIT, NO_SPACE, DONE, DUPLICATE };                           /* results */

/* -- streams ------------------------------------------------------------------------------------------------------ */
typedef Stream {
    byte at;                                   /* which allocator */
    mtype phase = UNUSED;                      /* of the allocator's side */
    byte chunks; byte holder[BLOCKS]; byte digest[BLOCKS]          /* a report, staged */
};
Stream stream[SLOTS];
/* Attach: incarnation, epoch, session to resume, last step. Chunk: number, block, holder, digest. End: chunks, last
 * step. Step: session, number, ack, operation. Beat: ack. */
chan up[SLOTS] = [ROOM] of { mtype, byte, byte, byte, byte };
/* Resumed, Ready: session, next step. Reply: session, number, operation, result, block. Error: reason. */
chan down[SLOTS] = [ROOM] of { mtype, byte, byte, byte, byte, byte };

/* -- operations: the id of a grow is that of its sequence ---------------------------------------------------------- */
mtype kind[OPS + 1];
byte target[OPS + 1];                          /* a grow's content; the sequence of a commit and of a free */
byte submitted = 0;

/* -- the owner ---------------------------------------------------------------------------------------------------- */
byte current = NONE;                           /* the only stream that it reads */
mtype phase = IDLE;
byte incarnation = 1, epoch = 0, session = 0, last = 0, beaten = 0;
byte asked[WINDOW], sent_session[WINDOW], sent_ack[WINDOW];        /* unanswered steps, from last + 1 on; the bytes */
byte holder[BLOCKS], digest[BLOCKS];           /* the ledger, or mirror */
byte pages[BLOCKS];                            /* what is really written there */
bool refused[ALLOCATORS];                      /* another owner has the pool there: wait until its lease ends */

/* -- the allocators ----------------------------------------------------------------------------------------------- */
typedef Pool {
    byte incarnation, epoch, session, next, told;
    byte stream = NONE;                        /* the current one */
    byte holder[BLOCKS]; byte digest[BLOCKS];
    byte kept[WINDOW]; byte kept_ack[WINDOW]; byte kept_result[WINDOW]; byte kept_block[WINDOW]   /* newest first */
};
Pool pool[ALLOCATORS];
byte sessions = 0;                             /* ids given out: never one twice, as 128 random bits */
byte faults = FAULTS;

/* What an atomic step chose; zero between steps. */
byte slot, place, op, prefer, reason, breaks, fails;
inline settle() { slot = 0; place = 0; op = 0; prefer = 0; reason = 0; breaks = 0; fails = 0 }

/* Scratch of one deterministic step, no part of the state. */
hidden byte each, match, block, count, result, first, second, third, fourth, victim, applies, resends, whole;
hidden short ago;
hidden mtype message;

#define has_slot (stream[0].phase == UNUSED || stream[1].phase == UNUSED || stream[SLOTS - 1].phase == UNUSED)
#define serves(a, on) (stream[on].at == a && stream[on].phase != UNUSED && stream[on].phase != ENDED)
#define attended(a) (current != NONE && pool[a].stream == current)
#define unanswered (asked[0] != 0)
#define content(sequence) target[sequence]

inline send(what, e, f, g, h) {
    if
    :: stream[current].phase != ENDED -> assert(len(up[current]) < ROOM); up[current]!what(e, f, g, h)
    :: else                                    /* nobody is there to read it, and the reason is on its way */
    fi
}

/* Nobody reads a stream that the owner left, so what it would bring is not kept. */
inline tell(on, what, e, f, g, h, j) {
    if
    :: (on == current || mistake(OLD_STREAM_READ)) && len(down[on]) < ROOM -> down[on]!what(e, f, g, h, j)
    :: else -> assert(on != current)
    fi
}

/* SessionMachine.close: the allocator is done with a stream, and what it has not read of it will not be read. */
inline close(on) {
    if
    :: pool[stream[on].at].stream == on || mistake(OLD_STREAM_DISCONNECTS) -> pool[stream[on].at].stream = NONE
    :: else
    fi;
    do :: len(up[on]) > 0 -> up[on]?_, _, _, _, _ :: else -> break od;
    if :: !mistake(CUT_REPORT_GOES_ON) -> unstage(on) :: else fi;
    if :: on == current -> stream[on].phase = ENDED :: else -> stream[on].phase = UNUSED; stream[on].at = 0 fi
}

inline unstage(on) {
    stream[on].chunks = 0;
    for (each : 0 .. BLOCKS - 1) { stream[on].holder[each] = 0; stream[on].digest[each] = 0 }
}

inline forget_answer(a, n) {
    pool[a].kept[n] = 0; pool[a].kept_ack[n] = 0; pool[a].kept_result[n] = 0; pool[a].kept_block[n] = 0
}

/* I4, whenever nothing is under way. */
inline compare() {
    if
    :: current != NONE && phase == OPEN && stream[current].phase == OPEN && !unanswered &&
       len(up[current]) == 0 && len(down[current]) == 0 ->
        place = stream[current].at;
        assert(pool[place].stream == current && pool[place].incarnation == incarnation);  /* I7: our pool is in force */
        assert(pool[place].session == session && pool[place].next == last + 1);           /* I4: same session and step */
        for (each : 0 .. BLOCKS - 1) {
            assert(pool[place].holder[each] == holder[each]);                             /* I4: same tables */
            assert(pool[place].digest[each] == digest[each])                              /* I4: same digests */
        }
    :: else
    fi
}

/* ================================================ an allocator =================================================== */

/* Directory.attach. first: incarnation, second: epoch, third: session, fourth: last step. */
inline take_attach(a) {
    if
    :: pool[a].incarnation != 0 && pool[a].incarnation != first && !mistake(RIVAL_DISPLACES) -> reason = POOL_OWNED
    :: pool[a].incarnation == first && second <= pool[a].epoch && !mistake(OLD_EPOCH_TAKES_OVER) -> reason = FENCED
    :: else ->
        assert(!attended(a));                                                             /* I8: the newest stream stays */
        if :: !mistake(OLD_STREAM_SERVED) -> victim = pool[a].stream; reason = FENCED :: else fi;
        match = pool[a].incarnation == first && pool[a].session != 0 && (pool[a].session == third ||
            mistake(ANY_SESSION_RESUMED) || (mistake(NUMBERS_PROVE_STATE) && third != 0 && pool[a].next == fourth + 1));
        pool[a].incarnation = first; pool[a].epoch = second; pool[a].stream = slot;
        if
        :: match ->
            if :: mistake(NUMBERS_PROVE_STATE) -> pool[a].session = third :: else fi;
            stream[slot].phase = OPEN; tell(slot, RESUMED, pool[a].session, pool[a].next, 0, 0, 0)
        :: else -> stream[slot].phase = REPORTING; tell(slot, REPORT_REQUIRED, 0, 0, 0, 0, 0)
        fi
    fi
}

/* StagedReport.add. first: number, second: block, third: holder, fourth: digest. */
inline take_chunk(a) {
    if
    :: stream[slot].phase == REPORTING && first == stream[slot].chunks ->
        stream[slot].chunks++; stream[slot].holder[second] = third; stream[slot].digest[second] = fourth
    :: else -> assert(mistake(READY_AT_FIRST_CHUNK) || mistake(CUT_REPORT_GOES_ON));
        if :: mistake(READY_AT_FIRST_CHUNK) -> pool[a].holder[second] = third; pool[a].digest[second] = fourth :: else fi
    fi
}

/* SessionMachine._open, Directory.open: all of a report at once, under a new session id. second: last step. */
inline put_in_force(a) {
    if :: mistake(REPORT_KEEPS_SESSION) -> pool[a].session = 1 :: else -> sessions++; pool[a].session = sessions fi;
    if :: !mistake(REPORT_KEEPS_NUMBER) || pool[a].next == 0 -> pool[a].next = second + 1 :: else fi;
    for (each : 0 .. BLOCKS - 1) {
        if
        :: !mistake(REPORT_KEEPS_BLOCKS) ->
            pool[a].holder[each] = stream[slot].holder[each]; pool[a].digest[each] = stream[slot].digest[each]
        :: else
        fi
    }
    for (each : 0 .. WINDOW - 1) { forget_answer(a, each) }
    pool[a].told = second;                                   /* watchers start over from a snapshot */
    stream[slot].phase = OPEN; unstage(slot);
    tell(slot, READY, pool[a].session, pool[a].next, 0, 0, 0)
}

/* SessionMachine._step, StepLog.replay. first: session, second: number, third: ack, op: operation. */
inline take_step(a) {
    ago = pool[a].next - 1 - second;
    if
    :: first != pool[a].session -> reason = SESSION_UNKNOWN
    :: first == pool[a].session && ago == -1 -> applies = true
    :: else ->
        if
        :: ago < -1 || ago >= WINDOW || pool[a].kept[ago % WINDOW] == 0 -> reason = STEP_GAP
        :: else ->
            if
            :: mistake(STEP_APPLIED_AGAIN) -> pool[a].next = second; applies = true
            :: !mistake(STEP_APPLIED_AGAIN) && (pool[a].kept[ago] != op || pool[a].kept_ack[ago] != third) ->
                reason = STEP_MISMATCH
            :: else ->
                if :: mistake(WRONG_ANSWER_REPLAYED) -> ago = 0 :: else fi;
                tell(slot, REPLY, first, second, pool[a].kept[ago], pool[a].kept_result[ago], pool[a].kept_block[ago])
            fi
        fi
    fi
}

/* steps.apply_step on the pool. Sets result, and block: the operation's. */
inline apply(a) {
    match = NONE; block = NONE; result = DONE;
    for (each : 0 .. BLOCKS - 1) {
        if
        :: kind[op] == GROW ->
            assert(pool[a].holder[each] != op);                                           /* I5: no second grant */
            place = (prefer + each) % BLOCKS;                /* any free block may be granted */
            if :: pool[a].holder[place] == 0 -> block = place :: else fi;
            if :: pool[a].holder[each] == 0 && pool[a].digest[each] == target[op] -> match = each :: else fi
        :: else ->
            if :: pool[a].holder[each] == target[op] -> block = each :: else fi;
            if :: kind[op] == COMMIT && pool[a].digest[each] == content(target[op]) -> result = DUPLICATE :: else fi
        fi
    }
    if
    :: kind[op] == GROW && match != NONE -> result = HIT; block = match; pool[a].holder[block] = op
    :: kind[op] == GROW && match == NONE && block != NONE ->
        result = GRANTED; pool[a].holder[block] = op; pool[a].digest[block] = 0
    :: kind[op] == GROW && match == NONE && block == NONE -> result = NO_SPACE
    :: else ->
        assert(block != NONE);                                                            /* I4: the sequence lives */
        if
        :: kind[op] == COMMIT && result == DONE -> pool[a].digest[block] = content(target[op])
        :: kind[op] == FREE -> pool[a].holder[block] = 0
        :: else
        fi
    fi
}

/* Sessions.apply, StepLog.record and forget. */
inline apply_step(a) {
    apply(a);
    if
    :: breaks ->                                             /* applied, or half of it, but not recorded */
        faults--; reason = QUARANTINED;
        if :: !mistake(DEFECT_KEEPS_SESSION) -> pool[a].session = 0 :: else fi
    :: else ->
        for (each : 1 .. WINDOW - 1) {
            place = WINDOW - each;
            pool[a].kept[place] = pool[a].kept[place - 1]; pool[a].kept_ack[place] = pool[a].kept_ack[place - 1];
            pool[a].kept_result[place] = pool[a].kept_result[place - 1]; pool[a].kept_block[place] = pool[a].kept_block[place - 1]
        }
        pool[a].kept[0] = op; pool[a].kept_ack[0] = third; pool[a].kept_result[0] = result; pool[a].kept_block[0] = block;
        pool[a].next++;
        for (each : 0 .. WINDOW - 1) {
            if
            :: second <= third + each + mistake(ACK_FORGETS_ONE_MORE) || mistake(ANSWERS_NOT_KEPT) ||
               (mistake(ONE_ANSWER_KEPT) && each > 0) -> forget_answer(a, each)
            :: else
            fi
        }
        tell(slot, REPLY, first, second, op, result, block)
    fi
}

/* EventLog.publish: watchers may see what steps up to number count did. */
inline publish(a) {
    if :: count > pool[a].told -> pool[a].told = count :: else fi;
    assert(pool[a].incarnation != incarnation || pool[a].told <= last)                    /* rule 12: nothing is told too early */
}

/* SessionMachine.receive. */
inline take(a) {
    up[slot]?message, first, second, third, fourth;
    reason = 0; victim = slot; applies = false; op = fourth;
    whole = message == REPORT_END && stream[slot].phase == REPORTING;
    if
    :: message == ATTACH -> take_attach(a)
    :: message == CHUNK -> whole = mistake(READY_AT_FIRST_CHUNK) && stream[slot].phase == REPORTING;
        take_chunk(a);
        second = last
    :: message == STEP -> take_step(a)
    :: else
    fi;
    if :: whole -> put_in_force(a) :: else fi;
    if :: applies -> apply_step(a) :: else fi;
    if
    :: message == BEAT || applies ->
        count = (message == BEAT -> first : (mistake(EVENTS_BEFORE_ACK) -> second : third));
        if :: count >= pool[a].next -> count = pool[a].next - 1 :: else fi;
        publish(a)
    :: else
    fi;
    if :: reason != 0 && victim != NONE -> tell(victim, ERROR, reason, 0, 0, 0, 0); close(victim) :: else fi;
    compare()
}

#define readable(on) (serves(a, on) && len(up[on]) > 0)
#define left(on) (serves(a, on) && current != on)

proctype Allocator(byte a) {
end:
    do
    :: atomic {                                              /* it reads a stream */
        readable(0) || readable(1) || readable(SLOTS - 1) ->
        if :: readable(0) -> slot = 0 :: readable(1) -> slot = 1 :: SLOTS > 2 && readable(SLOTS - 1) -> slot = SLOTS - 1 fi;
        if
        :: up[slot]?[STEP, _, _, _, _] && strikes(DEFECT) -> breaks = 1
        :: up[slot]?[STEP, _, _, _, _] && BLOCKS > 1 -> prefer = 1
        :: true
        fi;
        d_step { take(a); settle() }
    }
    :: atomic {                                              /* or notices that its client is gone */
        left(0) || left(1) || left(SLOTS - 1) ->
        if :: left(0) -> slot = 0 :: left(1) -> slot = 1 :: SLOTS > 2 && left(SLOTS - 1) -> slot = SLOTS - 1 fi;
        d_step { close(slot); compare(); settle() }
    }
    od
}

/* ================================================== the owner ==================================================== */

/* PoolOwner.attach, wherever the name leads: to place. */
inline attach() {
    current = 0;
    do :: stream[current].phase != UNUSED -> current++ :: else -> break od;
    do :: len(down[current]) > 0 -> down[current]?_, _, _, _, _, _ :: else -> break od;
    stream[current].at = place; stream[current].phase = ATTACHING;
    if :: mistake(EPOCH_STANDS_STILL) -> epoch = 1 :: else -> epoch++ fi;
    phase = ATTACHING; beaten = 0;
    send(ATTACH, incarnation, epoch, session, last)
}

/* PoolOwner.lose. */
inline leave() {
    if :: stream[current].phase == ENDED -> stream[current].phase = UNUSED; stream[current].at = 0 :: else fi;
    do :: len(down[current]) > 0 && !mistake(OLD_STREAM_READ) -> down[current]?_, _, _, _, _, _ :: else -> break od;
    current = NONE; phase = IDLE
}

/* PoolOwner._send_step: step last + 1 + n, with what the owner knows now. */
inline send_step(n) {
    sent_session[n] = session; sent_ack[n] = last; beaten = BEATS * last;
    send(STEP, session, last + 1 + n, last, asked[n])
}

/* PoolOwner.submit: the operation that was chosen. */
inline submit() {
    submitted++; each = 0;
    do :: asked[each] != 0 -> each++ :: else -> break od;
    asked[each] = submitted;
    if :: phase == OPEN -> send_step(each) :: else fi
}

/* Sequence q may be named: it lives, and no unanswered step commits or frees it. */
#define is_free_to(q) (q != 0 && !(asked[0] != 0 && kind[asked[0]] != GROW && target[asked[0]] == q))
#define is_written(n) (pages[n] == content(holder[n]) || mistake(COMMIT_BEFORE_COMPUTED))

/* PoolOwner._resume. first: session, second: next step. */
inline resume() {
    assert(first == session && second > last);                                            /* rule 4: ours, and not behind */
    count = second - 1 - last;
    assert(count == 0 || (count <= WINDOW && asked[(count + WINDOW - 1) % WINDOW] != 0)); /* I5: applied is what was asked */
    phase = OPEN; resends = true;
    if :: mistake(RESUME_SKIPS_APPLIED) && count > 0 -> last++; shift() :: else fi;
    if
    :: mistake(REPLACED_AFTER_RESUME) && submitted < OPS && unanswered ->
        submitted++; asked[0] = submitted; kind[submitted] = GROW; target[submitted] = 1
    :: else
    fi
}

/* PoolOwner._report. */
inline report() {
    phase = REPORTING; count = 0;
    for (each : 0 .. BLOCKS - 1) {
        if
        :: holder[each] != 0 || (digest[each] != 0 && !mistake(REPORT_WITHOUT_CACHED)) ->
            send(CHUNK, count, each, holder[each], digest[each]); count++
        :: else
        fi
    }
    send(REPORT_END, count, last - (mistake(REPORT_NAMES_OLDER_STEP) && last > 0), 0, 0)
}

/* PoolOwner._open. first: session, second: next step. */
inline open() {
    assert(second == last + 1);                                                           /* I4: it goes on where we are */
    session = first; phase = OPEN; resends = true;
    for (each : 0 .. WINDOW - 1) { sent_session[each] = 0 }  /* all of it is sent anew */
}

/* After Resumed the same bytes, but for steps that never had any. */
inline resend() {
    for (each : 0 .. WINDOW - 1) {
        if
        :: asked[each] == 0 || (message == RESUMED && mistake(NOT_RESENT_AFTER_RESUME)) ||
           (message == READY && mistake(NOT_RESENT_AFTER_READY))
        :: else ->
            if
            :: sent_session[each] == 0 || mistake(RESENT_WITH_NEWER_ACK) -> sent_session[each] = session; sent_ack[each] = last
            :: else
            fi;
            send(STEP, sent_session[each], last + 1 + each, sent_ack[each], asked[each])
        fi
    }
}

inline shift() {
    for (each : 1 .. WINDOW - 1) {
        asked[each - 1] = asked[each]; sent_session[each - 1] = sent_session[each]; sent_ack[each - 1] = sent_ack[each]
    }
    asked[WINDOW - 1] = 0; sent_session[WINDOW - 1] = 0; sent_ack[WINDOW - 1] = 0
}

/* PoolOwner._take_answer, Ledger.apply. first: session, second: number, third: operation, fourth: result, block. */
inline take_answer() {
    op = third;
    assert(first == session && second == last + 1 && asked[0] == op);                     /* I5: the answer to this step */
    last = second; shift();
    if
    :: fourth == GRANTED ->
        assert(holder[block] == 0);                                                       /* I6: the block was free */
        holder[block] = op; digest[block] = 0;
        if :: fails -> faults--; pages[block] = 0 :: else -> pages[block] = target[op] fi
    :: fourth == HIT ->
        assert(holder[block] == 0 && digest[block] == target[op]);                        /* I6: the block was cached */
        assert(pages[block] == target[op]);                                               /* I1: a hit reads what it asked for */
        holder[block] = op
    :: fourth == NO_SPACE -> for (each : 0 .. BLOCKS - 1) { assert(holder[each] != 0) }   /* I4: all blocks are held */
    :: fourth == DUPLICATE
    :: fourth == DONE ->
        assert(holder[block] == target[op]);                                              /* I4: the sequence is there */
        if
        :: kind[op] == COMMIT -> digest[block] = content(target[op]);
            assert(pages[block] == digest[block])                                         /* I1: a digest names what was written */
        :: else -> holder[block] = 0
        fi
    fi
}

/* PoolOwner.receive, from place. */
inline receive() {
    down[place]?message, first, second, third, fourth, block;
    resends = false;
    assert(message == ERROR || (message == REPLY && phase == OPEN) || (message == READY && phase == REPORTING) ||
        ((message == RESUMED || message == REPORT_REQUIRED) && phase == ATTACHING));      /* rule 9: an answer to what was asked */
    if :: message != ERROR -> refused[stream[place].at] = false :: else fi;
    if
    :: message == RESUMED -> resume()
    :: message == REPORT_REQUIRED -> report()
    :: message == READY -> open()
    :: message == REPLY -> take_answer()
    :: message == ERROR ->
        assert(first != FENCED);                                                          /* I8: the newest stream is not fenced */
        assert(first != SESSION_UNKNOWN && first != STEP_GAP && first != STEP_MISMATCH);  /* I5: both sides know the same steps */
        if :: first == POOL_OWNED -> refused[stream[place].at] = true :: else fi;
        leave()
    fi;
    if :: resends -> resend() :: else fi;
    compare()
}

/* After POOL_OWNED it tries again when the other's lease has ended: how often it is refused before makes no difference. */
#define may_attach(a) (!refused[a] || pool[a].incarnation == 0 || pool[a].incarnation == incarnation)
#define answered (submitted == OPS && !unanswered && phase == OPEN)
#define heard(on) (current == on && len(down[on]) > 0)

proctype Owner() {
    do
    :: atomic {
        current == NONE && has_slot && (may_attach(0) || may_attach(ALLOCATORS - 1)) ->
        if :: may_attach(0) -> place = 0 :: ALLOCATORS > 1 && may_attach(ALLOCATORS - 1) -> place = ALLOCATORS - 1 fi;
        d_step { attach(); settle() }
    }
    :: atomic {                                              /* any operation that needs no earlier answer */
        submitted < OPS && asked[WINDOW - 1] == 0 ->
        op = submitted + 1; kind[op] = GROW; target[op] = 1;
        if
        :: CONTENTS > 1 && op > 1 -> target[op] = 2
        :: true
        :: is_free_to(holder[0]) -> kind[op] = FREE; target[op] = holder[0]
        :: is_free_to(holder[BLOCKS - 1]) -> kind[op] = FREE; target[op] = holder[BLOCKS - 1]
        :: is_free_to(holder[0]) && digest[0] == 0 && is_written(0) -> kind[op] = COMMIT; target[op] = holder[0]
        :: is_free_to(holder[BLOCKS - 1]) && digest[BLOCKS - 1] == 0 && is_written(BLOCKS - 1) ->
            kind[op] = COMMIT; target[op] = holder[BLOCKS - 1]
        fi;
        d_step { submit(); settle() }
    }
    :: atomic { BEATS && phase == OPEN && beaten < last -> beaten = last; send(BEAT, last, 0, 0, 0) }
    :: atomic {
        current != NONE && (len(down[current]) > 0 || (mistake(OLD_STREAM_READ) && phase == OPEN && len(down[0]) > 0)) ->
        if :: len(down[current]) > 0 -> place = current :: mistake(OLD_STREAM_READ) && phase == OPEN && len(down[0]) > 0 -> place = 0 fi;
        if :: strikes(DEVICE) && down[place]?[REPLY, _, _, _, GRANTED, _] -> fails = 1 :: true fi;
        d_step { receive(); settle() }
    }
    :: atomic { answered -> break }                          /* else the end is not a valid one: progress */
    od
}

/* ================================================== the faults =================================================== */

/* A pool is gone: its lease ended, or the whole process did, and all streams with it. */
inline drop() {
    for (slot : 0 .. SLOTS - 1) {
        if
        :: serves(place, slot) && (reason == GONE || (pool[place].stream == slot && !mistake(EXPIRED_STREAM_SERVED))) ->
            do :: fails && slot == current && len(down[slot]) > 0 -> down[slot]?_, _, _, _, _, _ :: else -> break od;
            tell(slot, ERROR, reason, 0, 0, 0, 0);
            close(slot)
        :: else
        fi
    }
    for (each : 0 .. BLOCKS - 1) { pool[place].holder[each] = 0; pool[place].digest[each] = 0 }
    for (each : 0 .. WINDOW - 1) { forget_answer(place, each) }
    pool[place].incarnation = 0; pool[place].epoch = 0; pool[place].session = 0; pool[place].next = 0;
    pool[place].told = 0; pool[place].stream = NONE;
}

/* All that the owner knows is gone. Its old stream may still deliver. */
inline restart() {
    if :: current != NONE -> leave() :: else fi;
    if :: !mistake(INCARNATION_SURVIVES) -> incarnation++ :: else fi;
    for (each : 0 .. WINDOW - 1) { asked[each] = 0; sent_session[each] = 0; sent_ack[each] = 0 }
    for (each : 0 .. BLOCKS - 1) {
        pages[each] = 0;
        if :: !mistake(LEDGER_SURVIVES) -> holder[each] = 0; digest[each] = 0 :: else fi
    }
    for (each : 0 .. ALLOCATORS - 1) { refused[each] = false }
    epoch = 0; session = 0; last = 0; beaten = 0;
}

/* It wants no more than to be the owner of an empty pool. Nobody looks at what it is told. */
inline rival() {
    slot = 0;
    do :: stream[slot].phase != UNUSED -> slot++ :: else -> break od;
    stream[slot].at = place; stream[slot].phase = ATTACHING;
    up[slot]!ATTACH(100 + faults, 1, 0, 0); up[slot]!REPORT_END(0, 0, 0, 0)
}

/* A lease ends when its owner is another life of ours, or a rival, which nobody hears of any more; else it is a fault. */
#define is_abandoned(a) (pool[a].incarnation != 0 && pool[a].incarnation != incarnation && !mistake(LEASE_NEVER_ENDS))
#define may_expire(a) (is_abandoned(a) || (strikes(EXPIRY) && pool[a].incarnation == incarnation))
#define may_crash(a) (strikes(CRASH) && pool[a].incarnation != 0)

proctype Faults() {
end:
    do
    :: atomic { strikes(LOSS) && current != NONE -> d_step { faults--; leave(); settle() } }
    :: atomic {
        may_crash(0) || may_crash(ALLOCATORS - 1) || may_expire(0) || may_expire(ALLOCATORS - 1) ->
        if
        :: may_crash(0) -> place = 0; reason = GONE
        :: may_expire(0) -> place = 0; reason = IDLE
        :: ALLOCATORS > 1 && may_crash(ALLOCATORS - 1) -> place = ALLOCATORS - 1; reason = GONE
        :: ALLOCATORS > 1 && may_expire(ALLOCATORS - 1) -> place = ALLOCATORS - 1; reason = IDLE
        fi;
        if :: reason == GONE -> fails = 1 :: true fi;     /* answers that are under way are lost, or not */
        d_step { faults = faults - !(reason == IDLE && is_abandoned(place)); drop(); settle() }
    }
    :: atomic {
        strikes(RIVAL) && has_slot ->
        if :: place = 0 :: place = ALLOCATORS - 1 fi;
        d_step { faults--; rival(); settle() }
    }
    :: atomic { strikes(RESTART) -> d_step { faults--; restart(); settle() } }
    od
}

init { atomic { for (each : 0 .. ALLOCATORS - 1) { run Allocator(each) } run Owner(); run Faults() } }

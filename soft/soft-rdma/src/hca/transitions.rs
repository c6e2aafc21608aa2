//! The state machine of a queue pair: which changes are allowed, and which attributes each needs.
//!
//! Tables as in the InfiniBand specification (volume 1, 10.3.1 and 11.2.5.2), for the two types that
//! exist here.

use rustix::io::Errno;

use crate::abi::*;

/// Type of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reliable connection.
    Rc,
    /// Unreliable datagram.
    Ud,
}

/// Attributes a change must and may have (besides the state itself), or `None` if there is no such
/// change.
fn masks(kind: Kind, from: i32, to: i32) -> Option<(i32, i32)> {
    const SETUP: i32 = IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    const RTR: i32 = IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    const RTS: i32 = IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;
    const AGAIN: i32 = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER;

    Some(match (kind, from, to) {
        (_, _, IBV_QPS_RESET | IBV_QPS_ERR) => (0, IBV_QP_CUR_STATE),
        (Kind::Rc, IBV_QPS_RESET, IBV_QPS_INIT) => (SETUP | IBV_QP_ACCESS_FLAGS, 0),
        (Kind::Ud, IBV_QPS_RESET, IBV_QPS_INIT) => (SETUP | IBV_QP_QKEY, 0),
        (Kind::Rc, IBV_QPS_INIT, IBV_QPS_INIT) => (0, SETUP | IBV_QP_ACCESS_FLAGS),
        (Kind::Ud, IBV_QPS_INIT, IBV_QPS_INIT) => (0, SETUP | IBV_QP_QKEY),
        (Kind::Rc, IBV_QPS_INIT, IBV_QPS_RTR) => (RTR, IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX),
        (Kind::Ud, IBV_QPS_INIT, IBV_QPS_RTR) => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
        (Kind::Rc, IBV_QPS_RTR, IBV_QPS_RTS) => (RTS, AGAIN),
        (Kind::Ud, IBV_QPS_RTR, IBV_QPS_RTS) => (IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY),
        (Kind::Rc, IBV_QPS_RTS, IBV_QPS_RTS) => (0, AGAIN),
        (Kind::Ud, IBV_QPS_RTS | IBV_QPS_SQE, IBV_QPS_RTS) => (0, IBV_QP_CUR_STATE | IBV_QP_QKEY),
        _ => return None,
    })
}

/// Checks a change and carries it out on the attributes. `timeout` and the like are only changed if
/// the whole change is valid.
pub(crate) fn modify(
    kind: Kind,
    now: &mut ibv_qp_attr,
    new: &ibv_qp_attr,
    mask: i32,
) -> Result<(), Errno> {
    let drains = mask & IBV_QP_STATE != 0 && new.qp_state == IBV_QPS_SQD;
    if drains || mask & (IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_CAP) != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let from = now.qp_state;
    if mask & IBV_QP_CUR_STATE != 0 && new.cur_qp_state != from {
        return Err(Errno::INVAL);
    }
    let to = if mask & IBV_QP_STATE != 0 { new.qp_state } else { from };
    let (required, optional) = masks(kind, from, to).ok_or(Errno::INVAL)?;
    let given = mask & !IBV_QP_STATE;
    if given & required != required || given & !(required | optional) != 0 {
        return Err(Errno::INVAL);
    }
    check_values(new, mask)?;

    if to == IBV_QPS_RESET {
        *now = ibv_qp_attr { cap: now.cap, ..Default::default() };
        return Ok(());
    }
    macro_rules! take {
        ($($bit:ident: $($field:ident),+;)*) => {$(if mask & $bit != 0 { $(now.$field = new.$field;)+ })*};
    }
    take! {
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_QKEY: qkey;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_DEST_QPN: dest_qp_num;
    }
    now.qp_state = to;
    now.cur_qp_state = to;
    Ok(())
}

fn check_values(new: &ibv_qp_attr, mask: i32) -> Result<(), Errno> {
    let is = |bit: i32| mask & bit != 0;
    let wrong = is(IBV_QP_PORT) && new.port_num != 1
        || is(IBV_QP_PKEY_INDEX) && new.pkey_index != 0
        || is(IBV_QP_PATH_MTU) && !(1..=IBV_MTU_4096).contains(&new.path_mtu)
        || is(IBV_QP_TIMEOUT) && new.timeout > 31
        || is(IBV_QP_RETRY_CNT) && new.retry_cnt > 7
        || is(IBV_QP_RNR_RETRY) && new.rnr_retry > 7
        || is(IBV_QP_MIN_RNR_TIMER) && new.min_rnr_timer > 31
        || is(IBV_QP_MAX_QP_RD_ATOMIC) && u32::from(new.max_rd_atomic) > super::MAX_RD_ATOMIC
        || is(IBV_QP_MAX_DEST_RD_ATOMIC)
            && u32::from(new.max_dest_rd_atomic) > super::MAX_RD_ATOMIC
        || is(IBV_QP_DEST_QPN) && new.dest_qp_num > 0xff_ffff
        || is(IBV_QP_AV)
            && (new.ah_attr.port_num != 1 || super::destination(&new.ah_attr).is_none());
    if wrong { Err(Errno::INVAL) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::Port;

    const INIT: i32 = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    const RTR: i32 = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    const RTS: i32 = IBV_QP_STATE
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;

    fn wanted(state: i32) -> ibv_qp_attr {
        let dlid = Port { node: 1, device: 0 }.lid();
        ibv_qp_attr {
            qp_state: state,
            port_num: 1,
            path_mtu: IBV_MTU_4096,
            ah_attr: ibv_ah_attr { dlid, port_num: 1, ..Default::default() },
            ..Default::default()
        }
    }

    #[test]
    fn rts_is_reached_with_all_attributes() {
        const STATE: i32 = IBV_QP_STATE;
        for (kind, masks) in [
            (Kind::Rc, [INIT | IBV_QP_ACCESS_FLAGS, RTR, RTS]),
            (Kind::Ud, [INIT | IBV_QP_QKEY, STATE, STATE | IBV_QP_SQ_PSN]),
        ] {
            let mut attr = ibv_qp_attr::default();
            assert!(modify(kind, &mut attr, &wanted(IBV_QPS_INIT), INIT).is_err(), "{kind:?}");
            for (state, mask) in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS].into_iter().zip(masks) {
                modify(kind, &mut attr, &wanted(state), mask).unwrap();
            }
            assert_eq!(attr.qp_state, IBV_QPS_RTS);
            let drained = modify(kind, &mut attr, &wanted(IBV_QPS_SQD), STATE);
            assert_eq!(drained, Err(Errno::OPNOTSUPP));
        }
    }

    #[test]
    fn each_missing_or_extra_attribute_is_refused() {
        for missing in (0..21).map(|bit| 1 << bit).filter(|bit| RTR & !IBV_QP_STATE & bit != 0) {
            let mut attr = wanted(IBV_QPS_INIT);
            let refused = modify(Kind::Rc, &mut attr, &wanted(IBV_QPS_RTR), RTR & !missing);
            assert_eq!(refused, Err(Errno::INVAL), "{missing:#x}");
            assert_eq!(attr.qp_state, IBV_QPS_INIT);
        }
        let mut attr = wanted(IBV_QPS_INIT);
        assert!(modify(Kind::Rc, &mut attr, &wanted(IBV_QPS_RTR), RTR | IBV_QP_TIMEOUT).is_err());
    }

    #[test]
    fn states_cannot_be_skipped_but_reset_and_error_are_always_possible() {
        for (from, to, mask) in [
            (IBV_QPS_RESET, IBV_QPS_RTR, RTR),
            (IBV_QPS_RESET, IBV_QPS_RTS, RTS),
            (IBV_QPS_INIT, IBV_QPS_RTS, RTS),
            (IBV_QPS_ERR, IBV_QPS_RTS, RTS),
            (IBV_QPS_ERR, IBV_QPS_INIT, INIT),
        ] {
            let mut attr = wanted(from);
            assert!(modify(Kind::Rc, &mut attr, &wanted(to), mask).is_err(), "{from} to {to}");
        }
        for from in [IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR] {
            for to in [IBV_QPS_RESET, IBV_QPS_ERR] {
                let mut attr = wanted(from);
                assert_eq!(modify(Kind::Ud, &mut attr, &wanted(to), IBV_QP_STATE), Ok(()));
                assert_eq!(attr.qp_state, to);
            }
        }
    }

    #[test]
    fn an_unknown_destination_or_value_is_refused() {
        for spoil in [
            (|new: &mut ibv_qp_attr| new.ah_attr.dlid = 0) as fn(&mut ibv_qp_attr),
            |new| new.ah_attr.port_num = 2,
            |new| new.path_mtu = 6,
            |new| new.min_rnr_timer = 32,
            |new| new.dest_qp_num = 1 << 24,
        ] {
            let mut attr = wanted(IBV_QPS_INIT);
            let mut new = wanted(IBV_QPS_RTR);
            spoil(&mut new);
            assert_eq!(modify(Kind::Rc, &mut attr, &new, RTR), Err(Errno::INVAL));
        }
    }
}

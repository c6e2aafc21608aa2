use proptest::prelude::*;

use super::*;

fn any_request() -> impl Strategy<Value = Request> {
    let opcode = prop_oneof![
        Just(Opcode::Send),
        Just(Opcode::Write),
        Just(Opcode::Read),
        Just(Opcode::CompareSwap),
        Just(Opcode::FetchAdd),
    ];
    (
        any::<[u32; 3]>(),
        any::<[u16; 2]>(),
        opcode,
        any::<Option<u32>>(),
        any::<bool>(),
        any::<[u64; 3]>(),
        prop::option::of(any_reference()),
        0..MAX_MESSAGE,
    )
        .prop_map(|(qpns, lids, opcode, imm, solicited, words, mut by_reference, length)| {
            if opcode == Opcode::Read {
                by_reference = by_reference.map(|_| Reference::default());
            }
            let named = by_reference.as_ref().filter(|_| opcode != Opcode::Read);
            let length = named.map_or(length, |named| named.length().expect("a few"));
            Request {
                dst_qpn: qpns[0],
                src_qpn: qpns[1],
                src_lid: lids[0],
                dst_lid: lids[1],
                psn: qpns[2],
                opcode,
                imm,
                solicited,
                length,
                remote: (words[0], qpns[0] ^ 7),
                operands: (words[1], words[2]),
                by_reference,
            }
        })
}

fn any_reference() -> impl Strategy<Value = Reference> {
    let segment = (any::<u64>(), 0u64..1000).prop_map(|(addr, len)| Segment { addr, len });
    let token = any::<(u64, u64)>().prop_map(|(addr, value)| Token { addr, value });
    (prop::collection::vec(segment, 0..9), prop::collection::vec(token, 0..5))
        .prop_map(|(segments, tokens)| Reference { segments, tokens })
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let outcome = prop_oneof![
        any::<u64>().prop_map(Outcome::Ack),
        (0u8..32).prop_map(Outcome::ReceiverNotReady),
        Just(Outcome::Dropped),
        Just(Outcome::InvalidRequest),
        Just(Outcome::AccessError),
        Just(Outcome::OperationError),
        Just(Outcome::RequesterFault),
    ];
    prop_oneof![
        any_request().prop_map(Frame::Request),
        (any::<[u32; 3]>(), outcome, prop::option::of(any_reference())).prop_map(
            |([dst_qpn, src_qpn, psn], outcome, offer)| {
                let response = Response { dst_qpn, src_qpn, psn, outcome };
                match offer {
                    Some(reference) => Frame::Offer(response, reference),
                    None => Frame::Response(response),
                }
            }
        ),
        (
            any::<[u32; 3]>(),
            any::<[u16; 2]>(),
            any::<u8>(),
            any::<Option<u32>>(),
            any::<bool>(),
            any::<Option<(u8, u32, u8)>>()
        )
            .prop_map(
                |([dst_qpn, src_qpn, qkey], [src_lid, dst_lid], sl, imm, solicited, grh)| {
                    Frame::Datagram(Datagram {
                        dst_qpn,
                        src_qpn,
                        src_lid,
                        dst_lid,
                        qkey,
                        sl,
                        imm,
                        solicited,
                        grh,
                    })
                }
            ),
        any::<(u64, u64)>().prop_map(|probe| Frame::Hello(Hello { probe })),
        any::<(bool, (u64, u64))>()
            .prop_map(|(direct, probe)| Frame::Welcome(Welcome { direct, probe })),
    ]
}

proptest! {
    #[test]
    fn a_frame_survives_the_wire(frame in any_frame(), after in prop::collection::vec(any::<u8>(), 0..9)) {
        let mut bytes = Vec::new();
        frame.encode(0, &mut bytes);
        let len = bytes.len();
        bytes.extend_from_slice(&after);
        prop_assert_eq!(Frame::decode(&bytes), Ok(Some((frame, len, 0))));
    }

    #[test]
    fn a_truncated_frame_asks_for_more(frame in any_frame(), cut in 1usize..200) {
        let mut bytes = Vec::new();
        frame.encode(0, &mut bytes);
        bytes.truncate(bytes.len().saturating_sub(cut));
        prop_assert_eq!(Frame::decode(&bytes), Ok(None));
    }

    #[test]
    fn any_bytes_are_parsed_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Frame::decode(&bytes);
    }

    #[test]
    fn a_changed_byte_is_parsed_without_harm(frame in any_frame(), at: usize, xor in 1u8..) {
        let mut bytes = Vec::new();
        frame.encode(0, &mut bytes);
        let at = at % bytes.len();
        bytes[at] ^= xor;
        let _ = Frame::decode(&bytes);
    }

    #[test]
    fn a_payload_longer_than_the_request_is_refused(mut request in any_request(), more in 1u32..) {
        request.length = request.length.min(MAX_MESSAGE - 1);
        request.by_reference = None;
        request.opcode = Opcode::Write;
        let mut bytes = Vec::new();
        Frame::Request(request.clone()).encode(request.length.saturating_add(more), &mut bytes);
        prop_assert_eq!(Frame::decode(&bytes), Err(Malformed));
    }
}

use super::*;
use crate::protocol::chat::Reply;
use proptest::prelude::*;

fn file(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = b"\x93NUMPY".to_vec();
    file.extend([version, 0]);
    let length = u32::try_from(header.len()).expect("short");
    file.extend(&length.to_le_bytes()[..if version == 1 { 2 } else { 4 }]);
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

fn header(descr: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}   \n")
}

fn vllm(bytes: &[u8], rows: u64) -> Result<Routing, RoutingError> {
    decode(UpstreamKind::Vllm, RoutingHint::default(), &STANDARD.encode(bytes), 0, rows)
}

fn sglang(ids: &[i32], rows: u64, hint: RoutingHint) -> Result<Routing, RoutingError> {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    decode(UpstreamKind::Sglang, hint, &STANDARD.encode(bytes), 0, rows)
}

const fn hint(layers: Option<u32>, top_k: Option<u32>) -> RoutingHint {
    RoutingHint { layers, top_k }
}

fn fixture(name: &str) -> Reply {
    let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
    let mut reply = Reply::default();
    reply.feed(&std::fs::read(path).expect("fixture")).expect("readable");
    reply
}

fn request(more: &str) -> Request {
    let text = format!(r#"{{"model":"m","messages":[]{more}}}"#);
    Request::parse(text.into()).expect("request")
}

#[test]
fn both_engines_tell_the_same_experts_of_the_same_prompt() {
    let told = |kind, name, hint| {
        let reply = fixture(name);
        captured(kind, Some(hint), 0, reply.prompt_token_ids.as_deref(), &reply.choices[&0])
    };
    let vllm = told(UpstreamKind::Vllm, "vllm_chat_routed.json", RoutingHint::default());
    let sglang = told(UpstreamKind::Sglang, "sglang_chat.json", hint(None, Some(2)));
    assert_eq!((vllm.reason, sglang.reason), (None, None));
    let (vllm, sglang) = (vllm.routing.expect("read"), sglang.routing.expect("read"));
    let shape = |routing: &Routing| {
        let shape = *routing.shape();
        (shape.start, shape.rows, shape.layers, shape.top_k, shape.dtype, shape.layer_axis)
    };
    assert_eq!(shape(&vllm), (0, 24, 4, 2, RoutingDtype::U8, LayerAxis::Unknown));
    assert_eq!(shape(&sglang), (0, 17, 4, 2, RoutingDtype::U8, LayerAxis::AllHidden));
    // The prompt has twelve tokens: eleven rows whose next token is the same.
    let of_prompt = 11 * 4 * 2;
    assert_eq!(vllm.data()[..of_prompt], sglang.data()[..of_prompt]);
    assert_eq!(&vllm.data()[..8], [0, 0, 3, 0, 6, 3, 1, 6]);
}

#[test]
fn c16_rows_that_are_not_those_of_the_ids_are_refused() {
    for (rows, is_taken) in [(8, false), (9, true), (10, false)] {
        let data = vec![1; rows * 2];
        let npy = file(1, &header("|u1", &format!("({rows}, 2, 1)")), &data);
        let found = vllm(&npy, 9);
        assert_eq!(found.is_ok(), is_taken, "{rows}");
        if let Err(error) = found {
            assert_eq!(error.reason(), "routing_rows_mismatch");
        }
        let raw = sglang(&vec![1; rows * 2], 9, hint(Some(2), Some(1)));
        assert_eq!(raw.is_ok(), is_taken, "{rows}");
        if let Err(error) = raw {
            assert_eq!(error.reason(), "routing_rows_mismatch");
        }
    }
}

#[test]
fn c16_a_start_that_the_client_asked_for_places_the_rows() {
    let mut reply = fixture("vllm_chat_routed.json");
    let choice = reply.choices.get_mut(&0).expect("choice");
    let data: Vec<u8> = (0..20).collect();
    choice.routed_experts = Some(STANDARD.encode(file(1, &header("|u1", "(20, 1, 1)"), &data)));
    let told = |more: &str| {
        captured(
            UpstreamKind::Vllm,
            Some(RoutingHint::default()),
            first_row(UpstreamKind::Vllm, &request(more)),
            reply.prompt_token_ids.as_deref(),
            &reply.choices[&0],
        )
    };
    let placed = told(r#","routed_experts_prompt_start":4"#);
    let routing = placed.routing.expect("twelve prompt tokens and thirteen sampled ones less one, less four");
    assert_eq!((routing.shape().start, routing.shape().rows), (4, 20));
    for other in ["", r#","routed_experts_prompt_start":5"#, r#","routed_experts_prompt_start":99"#] {
        let refused = told(other);
        assert_eq!((refused.routing, refused.reason), (None, Some("routing_rows_mismatch")), "{other}");
    }
}

#[test]
fn a_routing_without_ids_or_in_another_form_says_why() {
    let mut reply = fixture("vllm_chat_routed.json");
    let told = |reply: &Reply, kind| {
        captured(kind, Some(RoutingHint::default()), 0, reply.prompt_token_ids.as_deref(), &reply.choices[&0])
    };
    assert_eq!(told(&reply, UpstreamKind::Sglang).reason, Some("routing_rows_mismatch"));
    reply.choices.get_mut(&0).expect("choice").routed_experts = Some("no base64".into());
    assert_eq!(told(&reply, UpstreamKind::Vllm).reason, Some("routing_unreadable"));
    reply.prompt_token_ids = None;
    assert_eq!(told(&reply, UpstreamKind::Vllm).reason, Some("routing_without_ids"));
    let unwanted =
        captured(UpstreamKind::Vllm, None, 0, reply.prompt_token_ids.as_deref(), &reply.choices[&0]);
    assert_eq!(unwanted, CapturedRouting::default());
    reply.choices.get_mut(&0).expect("choice").routed_experts = None;
    assert_eq!(told(&reply, UpstreamKind::Vllm), CapturedRouting::default());
}

#[test]
fn every_type_and_version_of_a_numpy_file_is_read() {
    let u2: Vec<u8> = [0_u16, 300, 2, 1].iter().flat_map(|id| id.to_le_bytes()).collect();
    let i4: Vec<u8> = [0_i32, 300, 2, 1].iter().flat_map(|id| id.to_le_bytes()).collect();
    for version in [1, 2] {
        for (descr, data) in [("<u2", &u2), ("<i4", &i4)] {
            let routing = vllm(&file(version, &header(descr, "(2, 1, 2)"), data), 2).expect("read");
            assert_eq!(routing.ids().collect::<Vec<_>>(), [0, 300, 2, 1]);
            assert_eq!(routing.shape().dtype, RoutingDtype::U16);
        }
    }
    let other_order = "{\"shape\": (2, 1, 2), \"fortran_order\": False, \"descr\": \"|u1\"}\n";
    let routing = vllm(&file(1, other_order, &[0, 1, 2, 3]), 2).expect("read");
    assert_eq!(routing.shape().dtype, RoutingDtype::U8);
    assert_eq!(vllm(&file(1, &header("|u1", "(0, 1, 2)"), &[]), 0).expect("no rows").shape().rows, 0);
}

#[test]
fn what_is_not_exactly_such_a_file_is_refused() {
    let good = header("|u1", "(2, 1, 2)");
    let data = [0, 1, 2, 3];
    let negative: Vec<u8> = (-4_i32..0).flat_map(i32::to_le_bytes).collect();
    let bad = [
        b"".to_vec(),
        b"\x93NUMPY\x01".to_vec(),
        file(1, &good, &data)[..30].to_vec(),
        file(3, &good, &data),
        file(1, &good, &data[..3]),
        file(1, &good, &[0, 1, 2, 3, 4]),
        file(1, &good.replace("False", "True"), &data),
        file(1, &good.replace("False", "None"), &data),
        file(1, &good.replace("|u1", "|i1"), &data),
        file(1, &good.replace("|u1", ">u1"), &data),
        file(1, &good.replace("(2, 1, 2)", "(2, 2)"), &data),
        file(1, &good.replace("(2, 1, 2)", "(2, -1, 2)"), &data),
        file(1, &good.replace("(2, 1, 2)", "(2, 0, 2)"), &[]),
        file(1, &good.replace("(2, 1, 2)", "(4294967295, 4294967295, 4294967295)"), &data),
        file(1, &good.replace("'descr': '|u1', ", ""), &data),
        file(1, &good.replace("'descr'", "'descr': '|u1', 'descr'"), &data),
        file(1, &good.replace("}", ", 'more': 1}"), &data),
        file(1, good.trim_end(), &data),
        file(1, &header("<i4", "(2, 1, 2)"), &negative),
    ];
    for bytes in bad {
        let error = vllm(&bytes, 2).expect_err("refused");
        assert_eq!(error.reason(), "routing_unreadable", "{:?}", String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn what_is_put_together_is_told_in_the_engines_own_form() {
    // To the byte as NumPy writes it.
    let told = fixture("vllm_inference_generate.json").choices[&0].routed_experts.clone().expect("routing");
    let routing = decode(UpstreamKind::Vllm, RoutingHint::default(), &told, 0, 24).expect("read");
    assert_eq!(encode(UpstreamKind::Vllm, &routing), told);
    let told = fixture("sglang_chat.json").choices[&0].routed_experts.clone().expect("routing");
    let routing = decode(UpstreamKind::Sglang, hint(None, Some(2)), &told, 0, 17).expect("read");
    assert_eq!(encode(UpstreamKind::Sglang, &routing), told);
    for largest in [255, 256, 65_536] {
        let shape = RoutingShape { rows: 1, top_k: 1, layers: 2, ..*routing.shape() };
        let wide = Routing::pack(shape, &[largest, 1]).expect("two ids");
        let read =
            decode(UpstreamKind::Vllm, RoutingHint::default(), &encode(UpstreamKind::Vllm, &wide), 0, 1);
        assert!(read.expect("read").ids().eq([largest, 1]));
    }
}

#[test]
fn where_a_reply_says_at_which_position_its_rows_begin_they_begin_there() {
    for (start, is_taken) in [(None, false), (Some(3), true), (Some(2), false), (Some(9), false)] {
        let npy = file(1, &header("|u1", "(2, 1, 1)"), &[7, 8]);
        let choice = Choice {
            token_ids: Some(vec![4, 5, 6]),
            routed_experts: Some(STANDARD.encode(npy)),
            routing_start: start,
            ..Choice::default()
        };
        let hint = Some(RoutingHint::default());
        let found = captured(UpstreamKind::Vllm, hint, 0, Some(&[1, 2, 3]), &choice);
        let begins = found.routing.map(|routing| routing.shape().start);
        assert_eq!(
            begins,
            start.and_then(|start| u32::try_from(start).ok()).filter(|_| is_taken),
            "{start:?}"
        );
        assert_eq!(found.reason, (!is_taken).then_some("routing_rows_mismatch"));
    }
}

#[test]
fn raw_ids_need_a_shape_that_is_settled() {
    let ids = [0, 1, 2, 3, 4, 5, 6, 7];
    let shape = |hint| sglang(&ids, 2, hint).map(|routing| (routing.shape().layers, routing.shape().top_k));
    assert_eq!(shape(hint(Some(2), Some(2))), Ok((2, 2)));
    assert_eq!(shape(hint(Some(1), None)), Ok((1, 4)));
    assert_eq!(shape(hint(None, Some(2))), Ok((2, 2)));
    assert_eq!(shape(hint(None, None)), Err(RoutingError::Ambiguous { ids: 4 }));
    for wrong in [hint(Some(3), None), hint(None, Some(0)), hint(Some(2), Some(1))] {
        assert!(matches!(shape(wrong), Err(RoutingError::RawLength { .. })), "{wrong:?}");
    }
    let single = sglang(&[5, 6], 2, hint(None, None)).expect("one id a row");
    assert_eq!((single.shape().layers, single.shape().top_k), (1, 1));
    assert_eq!(sglang(&[-1, 2], 2, hint(Some(1), None)), Err(RoutingError::NegativeId));
    assert!(sglang(&[], 0, hint(Some(1), Some(1))).is_err());
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), rows in 0_u64..5) {
        let _ = vllm(&bytes, rows);
        let mut with_magic = b"\x93NUMPY\x01\x00".to_vec();
        with_magic.extend(&bytes);
        let _ = vllm(&with_magic, rows);
        let _ = decode(UpstreamKind::Sglang, hint(None, Some(2)), &STANDARD.encode(&bytes), rows, rows);
        let _ = decode(UpstreamKind::Vllm, RoutingHint::default(), &String::from_utf8_lossy(&bytes), u64::MAX, rows);
    }

    #[test]
    fn arbitrary_headers_never_panic(header in "[{}'\"a-z:,() 0-9\n_]{0,60}") {
        let _ = vllm(&file(1, &header, &[1, 2, 3]), 1);
    }
}

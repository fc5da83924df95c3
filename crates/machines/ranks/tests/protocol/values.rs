//! The values of plans and sessions: numbers with every bit, prefixes, capacities.

use engine::{Capacity, PageHash};
use proptest::collection::vec;
use proptest::prelude::*;
use ranks::protocol::limits::{LimitError, VOCAB_MAX};
use ranks::protocol::session::{self, WirePrefix};
use ranks::protocol::{Lines, Number, Packed, RankRequest, encode};
use types::TokenId;

const VOCAB: usize = 50;

fn number_through_json(value: f32) -> f32 {
    let Number(again) = serde_json::from_str(&serde_json::to_string(&Number(value)).unwrap()).unwrap();
    again
}

fn prefix_through_a_line(prefix: engine::Prefix<'_>) -> WirePrefix {
    let mut line = Vec::new();
    encode(&RankRequest::Open { id: 1, tokens_max: 9, prefix: prefix.into() }, &mut line).unwrap();
    match Lines::new(&line[..]).read().unwrap().unwrap() {
        RankRequest::Open { prefix, .. } => prefix,
        other => panic!("an open became {other:?}"),
    }
}

proptest! {
    #[test]
    fn a_number_comes_back_with_every_bit(pattern in any::<u32>()) {
        let value = f32::from_bits(pattern);
        let again = number_through_json(value);
        prop_assert!(again.to_bits() == pattern || value.is_nan() && again.is_nan(), "{value:e} became {again:e}");
    }

    #[test]
    fn a_prefix_comes_back(
        tokens in vec((0..VOCAB as u32).prop_map(TokenId), 0..200),
        names in vec(any::<[u8; 32]>(), 0..7),
        reuse in any::<prop::sample::Index>(),
    ) {
        let pages: Vec<_> = names.into_iter().map(PageHash).take(tokens.len() / 32).collect();
        let prefix = engine::Prefix { tokens: &tokens, pages: &pages, reuse_max: reuse.index(tokens.len() + 1) };
        let checked = prefix_through_a_line(prefix).check(VOCAB).unwrap();
        let again = checked.as_prefix();
        prop_assert_eq!((again.tokens, again.pages, again.reuse_max), (prefix.tokens, prefix.pages, prefix.reuse_max));
    }
}

#[test]
fn the_numbers_at_the_edges_come_back_with_every_bit() {
    let edges = [0.0, -0.0, f32::MIN_POSITIVE, f32::MAX, f32::MIN, f32::EPSILON, f32::from_bits(1), 0.1, 1.0 / 3.0];
    // An odd stride, large enough for a short sweep, covers all exponents and both signs.
    let sweep = (0..u32::MAX).step_by(40_009).map(f32::from_bits).filter(|value| value.is_finite());
    for value in edges.into_iter().chain(sweep) {
        assert_eq!(number_through_json(value).to_bits(), value.to_bits(), "{value:e}");
    }
}

#[test]
fn numbers_that_json_does_not_have_are_strings() {
    let check = |value: f32, text: &str| {
        assert_eq!(serde_json::to_string(&Number(value)).unwrap(), text);
        let again: Number = serde_json::from_str(text).unwrap();
        assert!(again.0 == value || again.0.is_nan() && value.is_nan());
    };
    check(f32::INFINITY, "\"inf\"");
    check(f32::NEG_INFINITY, "\"-inf\"");
    check(f32::NAN, "\"nan\"");
    check(-f32::NAN, "\"nan\"");
    check(0.5, "0.5");
    for (text, value) in [("3", 3.0), ("-3", -3.0), ("1e-60", 0.0)] {
        assert_eq!(serde_json::from_str::<Number>(text).unwrap(), Number(value));
    }
    for text in ["1e39", "-1e39", "1e999", "\"Infinity\"", "\"1\"", "null", "true", "[]"] {
        assert!(serde_json::from_str::<Number>(text).is_err(), "{text}");
    }
}

#[test]
fn a_prefix_with_more_hashes_than_pages_is_refused() {
    let tokens = [TokenId(1); 70];
    let good = WirePrefix::from(engine::Prefix { tokens: &tokens, pages: &[PageHash([1; 32]); 2], reuse_max: 70 });
    assert!(good.check(VOCAB).is_ok() && WirePrefix::default().check(VOCAB).is_ok());
    let refused = |change: fn(&mut WirePrefix)| {
        let mut prefix = good.clone();
        change(&mut prefix);
        prefix.check(VOCAB).unwrap_err()
    };
    assert!(matches!(refused(|prefix| prefix.tokens.truncate(63)), LimitError::TooLarge { what: "page hashes", .. }));
    assert!(matches!(refused(|prefix| prefix.reuse_max = 71), LimitError::TooLarge { .. }));
    assert!(matches!(
        refused(|prefix| prefix.pages = Packed::of_u32(&[0; 9])),
        LimitError::IncompleteValue { bytes: 36, .. }
    ));
    assert!(matches!(refused(|prefix| prefix.tokens[0] = u32::MAX), LimitError::TokenOutOfRange { .. }));
}

#[test]
fn a_stage_gets_hashes_of_pages_without_tokens() {
    let prefix = engine::Prefix { tokens: &[], pages: &[PageHash([1; 32]); 2], reuse_max: 63 };
    let checked = prefix_through_a_line(prefix).check_stage().unwrap();
    assert_eq!((checked.as_prefix().pages, checked.as_prefix().reuse_max), (prefix.pages, 63));
    assert!(WirePrefix::from(prefix).check(VOCAB).is_err(), "without tokens it is no prefix of a whole model");
    let with_tokens = WirePrefix { tokens: vec![1], ..WirePrefix::from(prefix) };
    assert!(matches!(with_tokens.check_stage(), Err(LimitError::TooLarge { .. })));
    let far = WirePrefix { reuse_max: u64::MAX, ..WirePrefix::from(prefix) };
    assert!(matches!(far.check_stage(), Err(LimitError::TooLarge { .. })));
}

#[test]
fn a_capacity_comes_back_unless_it_is_impossible() {
    let good = Capacity {
        vocab: 150_000,
        positions_max: 40_960,
        rows_max: 512,
        sequences_max: 64,
        logit_rows_max: 64,
        step_pages_max: 1000,
        page_tokens: 32,
        pages_total: 1000,
        pages_free: 900,
        pages_cached: 100,
    };
    assert_eq!(Capacity::try_from(session::WireCapacity::from(good)), Ok(good));
    let changes: [fn(&mut session::WireCapacity); 7] = [
        |capacity| capacity.page_tokens = 0,
        |capacity| capacity.vocab = 0,
        |capacity| capacity.vocab = VOCAB_MAX as u64 + 1,
        |capacity| capacity.pages_total = u64::MAX,
        |capacity| capacity.pages_free = 1001,
        |capacity| capacity.pages_cached = 901,
        |capacity| capacity.rows_max = 0,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut wire = session::WireCapacity::from(good);
        change(&mut wire);
        assert!(Capacity::try_from(wire).is_err(), "change {index}");
    }
}

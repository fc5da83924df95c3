//! Coordinates find the distances they were adjusted by.

use super::Random;
use crate::Coordinate;

#[test]
fn coordinates_learn_round_trips() {
    let mut random = Random(1);
    let places: Vec<[f64; 3]> =
        (0..60).map(|_| [0.1 * random.uniform(), 0.1 * random.uniform(), 0.01 * random.uniform()]).collect();
    let real = |a: usize, b: usize| {
        let (a, b) = (places[a], places[b]);
        ((a[0] - b[0]).hypot(a[1] - b[1]) + a[2] + b[2]) as f32
    };
    let mut coordinates = vec![Coordinate::ORIGIN; places.len()];
    for _ in 0..100 {
        for a in 0..places.len() {
            let b = random.below(places.len() as u64) as usize;
            let direction = std::array::from_fn(|_| random.uniform() as f32 - 0.5);
            if a != b {
                coordinates[a] = coordinates[a].adjusted(&coordinates[b], real(a, b), direction);
            }
        }
    }
    let mut errors: Vec<f32> = (1..places.len())
        .flat_map(|a| (0..a).map(move |b| (a, b)))
        .map(|(a, b)| (coordinates[a].round_trip_seconds(&coordinates[b]) - real(a, b)).abs() / real(a, b))
        .collect();
    errors.sort_by(f32::total_cmp);
    assert!(errors[errors.len() / 2] < 0.1, "{}", errors[errors.len() / 2]);
    assert!(coordinates.iter().all(Coordinate::is_valid));
}

#[test]
fn what_is_not_plausible_changes_nothing() {
    let at = Coordinate::ORIGIN;
    let bad = Coordinate { height: f32::NAN, ..at };
    assert_eq!(at.adjusted(&bad, 0.1, [1.0; 3]), at);
    for seconds in [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e9] {
        assert_eq!(at.adjusted(&at, seconds, [1.0; 3]), at);
    }
    assert!(at.adjusted(&at, 0.1, [f32::NAN; 3]).is_valid());
    assert!(at.adjusted(&at, 0.1, [0.0; 3]).is_valid());
}

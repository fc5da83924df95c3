//! Network coordinates (Vivaldi, Dabek et al., SIGCOMM 2004): from a few measured round trips each peer finds a
//! position such that the distance of any two peers estimates the round trip between them. So 10,000 peers need not
//! measure 50 million pairs. The height is the part that every packet of the peer takes, such as a slow access line.

/// Limit of each part of a coordinate.
pub const COORDINATE_SECONDS_MAX: f32 = 10.0;

/// How far one measurement moves a coordinate, and its error.
const STEP: f32 = 0.25;
const HEIGHT_SECONDS_MIN: f32 = 1e-5;

/// A position, in seconds of round trip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coordinate {
    pub position: [f32; 3],
    pub height: f32,
    /// The relative error of estimates, as far as the peer knows: 1 for a coordinate without a measurement.
    pub error: f32,
}

impl Coordinate {
    /// Where a peer begins.
    pub const ORIGIN: Self = Self { position: [0.0; 3], height: HEIGHT_SECONDS_MIN, error: 1.0 };

    /// The estimated round trip, in seconds.
    pub fn round_trip_seconds(&self, other: &Self) -> f32 {
        self.distance(other) + self.height + other.height
    }

    /// The coordinate after a measured round trip to a peer. `direction` is a random vector, used for peers at the same
    /// position. A measurement or a coordinate that is not plausible changes nothing.
    pub fn adjusted(self, other: &Self, round_trip_seconds: f32, direction: [f32; 3]) -> Self {
        let is_plausible = (1e-6..=COORDINATE_SECONDS_MAX).contains(&round_trip_seconds);
        if !(is_plausible && other.is_valid()) {
            return self;
        }
        let estimate = self.round_trip_seconds(other);
        let weight = self.error / (self.error + other.error).max(1e-3);
        let sample_error = ((estimate - round_trip_seconds) / round_trip_seconds).abs().min(1.0);
        let error = (sample_error * STEP * weight + self.error * (1.0 - STEP * weight)).clamp(0.01, 1.0);
        let force = STEP * weight * (round_trip_seconds - estimate);
        let distance = self.distance(other);
        let away = match distance > 1e-6 {
            true => std::array::from_fn(|axis| (self.position[axis] - other.position[axis]) / distance),
            false => unit(direction),
        };
        let moved = Self {
            position: std::array::from_fn(|axis| self.position[axis] + force * away[axis]),
            height: (self.height + force * (self.height + other.height) / estimate.max(1e-6)).max(HEIGHT_SECONDS_MIN),
            error,
        };
        if moved.is_valid() { moved } else { self }
    }

    /// All parts are finite and within the limits.
    pub fn is_valid(&self) -> bool {
        let is_near = |axis: &f32| axis.abs() <= COORDINATE_SECONDS_MAX;
        self.position.iter().all(is_near)
            && (0.0..=COORDINATE_SECONDS_MAX).contains(&self.height)
            && (0.0..=1.0).contains(&self.error)
    }

    fn distance(&self, other: &Self) -> f32 {
        let squares = self.position.iter().zip(&other.position).map(|(a, b)| (a - b) * (a - b));
        squares.sum::<f32>().sqrt()
    }
}

fn unit(vector: [f32; 3]) -> [f32; 3] {
    let length = vector.iter().map(|axis| axis * axis).sum::<f32>().sqrt();
    match length.is_finite() && length > 1e-6 {
        true => vector.map(|axis| axis / length),
        false => [1.0, 0.0, 0.0],
    }
}

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lego_fuzz::targets::splices(data));

"""The default target model: where it is kept, how it is fetched and converted. Free of torch."""
